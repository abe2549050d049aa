"""Parameters that a library flattens and cuts, and wraps the modules of: the user's view of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from torch import nn

from fsdp_core.state.fqn import clean_name

__all__ = [
    "FlatMember",
    "ParameterOrders",
    "Tie",
    "by_user_names",
    "parameter_orders",
    "put_in_place",
    "stand_ins_in_place",
    "unwrapped",
]

#: In which order modules were written to hold their parameters.
ParameterOrders = Mapping[nn.Module, tuple[str, ...]]
#: A further place of a tied parameter, a module and the name there, and its first place.
Tie = tuple[nn.Module, str, nn.Module, str]


class FlatMember(Protocol):
    """A parameter of the user's that is a part of a flat one."""

    @property
    def owner(self) -> nn.Module:
        """The user's module that holds it."""
        ...

    @property
    def attribute(self) -> str:
        """Its name there."""
        ...


Member = TypeVar("Member", bound=FlatMember)


def parameter_orders(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[str, ...]]:
    """Note in which order modules hold their parameters, before a library takes these away.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameter_orders([layer, nn.ReLU()]) == {layer: ("weight", "bias")}
        True
    """
    return {module: tuple(module._parameters) for module in modules if module._parameters}


def put_in_place(root: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Let every parent inside ``root`` hold ``wrapper``, which holds ``module``, instead of ``module``."""
    inside = set(wrapper.modules())
    for parent in [parent for parent in root.modules() if parent not in inside]:
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = wrapper


def by_user_names(root: nn.Module, members: Iterable[Member]) -> Iterator[tuple[str, Member]]:
    """Each member with the name that the user has for it in ``root``, without what wrappers add."""
    names: dict[nn.Module, str] = {}
    for raw, module in root.named_modules():
        names.setdefault(module, clean_name(raw))
    for member in members:
        prefix = names[member.owner]
        yield (f"{prefix}.{member.attribute}" if prefix else member.attribute), member


@contextmanager
def unwrapped(root: nn.Module, inner: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """A context in which the units inside ``root`` are the user's own modules again, and not wrappers.

    Args:
        root: A module.
        inner: Gives the module in a wrapper; ``None`` for a module that is no wrapper.
    """
    taken: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    for parent in [parent for parent in root.modules() if inner(parent) is None]:
        for name, child in parent._modules.items():
            module = None if child is None else inner(child)
            if child is not None and module is not None:
                taken.append((parent, name, child, module))
    for parent, name, _, module in taken:
        parent._modules[name] = module
    try:
        yield
    finally:
        for parent, name, wrapper, _ in taken:
            parent._modules[name] = wrapper


@contextmanager
def stand_ins_in_place(
    stand_ins: Mapping[str, nn.Parameter],
    members: Mapping[str, tuple[FlatMember, nn.Parameter]],
    *,
    ties: Iterable[Tie],
    orders: ParameterOrders,
    holders: Iterable[nn.Module],
    is_flat: Callable[[str, nn.Parameter | None], bool],
) -> Iterator[None]:
    """A context in which modules hold parameters of the user's shapes in the user's order, and no flat ones.

    What is frozen or unfrozen meanwhile is afterwards.

    Args:
        stand_ins: What stands for each member, by the user's names.
        members: The members by the same names, and what an optimizer holds for each.
        ties: The further places of tied members.
        orders: What :func:`parameter_orders` has found before anything was flattened.
        holders: What holds flat parameters.
        is_flat: Tells, by a parameter's name in a module and itself, whether it is flat.
    """
    places: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for name, (member, _) in members.items():
        places.setdefault(member.owner, {})[member.attribute] = stand_ins[name]
    for owner, attribute, first, first_attribute in ties:
        places.setdefault(owner, {})[attribute] = places[first][first_attribute]
    hidden: list[tuple[nn.Module, str, object]] = []
    before = {owner: dict(owner._parameters) for owner in dict.fromkeys((*places, *holders))}
    for owner, parameters in before.items():
        shown = places.get(owner, {})
        owner._parameters.clear()
        for name in dict.fromkeys((*orders.get(owner, ()), *parameters, *shown)):
            if name in shown:
                owner._parameters[name] = shown[name]
                if name in owner.__dict__:
                    hidden.append((owner, name, owner.__dict__.pop(name)))
            elif name in parameters and not is_flat(name, parameters[name]):
                owner._parameters[name] = parameters[name]
    frozen = {name: parameter.requires_grad for name, parameter in stand_ins.items()}
    try:
        yield
    finally:
        for owner, parameters in before.items():
            owner._parameters.clear()
            owner._parameters.update(parameters)
        for owner, name, value in hidden:
            owner.__dict__[name] = value
        for name, parameter in stand_ins.items():
            if parameter.requires_grad != frozen[name]:
                members[name][1].requires_grad_(parameter.requires_grad)
