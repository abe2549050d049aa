"""The user's view of a module whose parameters a library has flattened and whose units it has wrapped."""

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

#: The order in which each module registered its parameters.
ParameterOrders = Mapping[nn.Module, tuple[str, ...]]
#: A tied parameter: a further module and attribute that hold it, then the module and attribute that hold it first.
Tie = tuple[nn.Module, str, nn.Module, str]


class FlatMember(Protocol):
    """One of the user's parameters, as a part of a flat parameter."""

    @property
    def owner(self) -> nn.Module:
        """The user's module that holds it."""
        ...

    @property
    def attribute(self) -> str:
        """Its attribute name in that module."""
        ...


Member = TypeVar("Member", bound=FlatMember)


def parameter_orders(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[str, ...]]:
    """Record the order of each module's parameters, before a library removes them.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameter_orders([layer, nn.ReLU()]) == {layer: ("weight", "bias")}
        True
    """
    return {module: tuple(module._parameters) for module in modules if module._parameters}


def put_in_place(root: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Replace ``module`` by ``wrapper``, which contains it, in every parent inside ``root``."""
    inside = set(wrapper.modules())
    for parent in [parent for parent in root.modules() if parent not in inside]:
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = wrapper


def by_user_names(root: nn.Module, members: Iterable[Member]) -> Iterator[tuple[str, Member]]:
    """Each member with its FQN in the user's module, without the prefixes that wrappers add."""
    names: dict[nn.Module, str] = {}
    for raw, module in root.named_modules():
        names.setdefault(module, clean_name(raw))
    for member in members:
        prefix = names[member.owner]
        yield (f"{prefix}.{member.attribute}" if prefix else member.attribute), member


@contextmanager
def unwrapped(root: nn.Module, inner: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """A context in which the units inside ``root`` are the user's own modules instead of wrappers.

    Args:
        root: A module.
        inner: Returns the module inside a wrapper; ``None`` for a module that is not a wrapper.
    """
    unwrapped_modules: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    for parent in [parent for parent in root.modules() if inner(parent) is None]:
        for name, child in parent._modules.items():
            module = None if child is None else inner(child)
            if child is not None and module is not None:
                unwrapped_modules.append((parent, name, child, module))
    for parent, name, _, module in unwrapped_modules:
        parent._modules[name] = module
    try:
        yield
    finally:
        for parent, name, wrapper, _ in unwrapped_modules:
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
    """A context in which modules hold stand-ins of the user's shapes in the user's order, and no flat parameters.

    Changes of ``requires_grad`` in the context are applied to the parameters that the optimizer holds.

    Args:
        stand_ins: The parameter that represents each member, by FQN.
        members: The members by FQN, with the parameter that an optimizer holds for each.
        ties: The additional places of tied members.
        orders: The result of :func:`parameter_orders` from before flattening.
        holders: The modules that hold flat parameters.
        is_flat: Called with a parameter's attribute name and the parameter; returns whether it is flat.
    """
    stand_ins_by_owner: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for name, (member, _) in members.items():
        stand_ins_by_owner.setdefault(member.owner, {})[member.attribute] = stand_ins[name]
    for owner, attribute, first, first_attribute in ties:
        stand_ins_by_owner.setdefault(owner, {})[attribute] = stand_ins_by_owner[first][first_attribute]
    hidden: list[tuple[nn.Module, str, object]] = []
    former_parameters = {owner: dict(owner._parameters) for owner in dict.fromkeys((*stand_ins_by_owner, *holders))}
    for owner, parameters in former_parameters.items():
        own_stand_ins = stand_ins_by_owner.get(owner, {})
        owner._parameters.clear()
        for name in dict.fromkeys((*orders.get(owner, ()), *parameters, *own_stand_ins)):
            if name in own_stand_ins:
                owner._parameters[name] = own_stand_ins[name]
                if name in owner.__dict__:
                    hidden.append((owner, name, owner.__dict__.pop(name)))
            elif name in parameters and not is_flat(name, parameters[name]):
                owner._parameters[name] = parameters[name]
    required_grad = {name: parameter.requires_grad for name, parameter in stand_ins.items()}
    try:
        yield
    finally:
        for owner, parameters in former_parameters.items():
            owner._parameters.clear()
            owner._parameters.update(parameters)
        for owner, name, value in hidden:
            owner.__dict__[name] = value
        for name, parameter in stand_ins.items():
            if parameter.requires_grad != required_grad[name]:
                members[name][1].requires_grad_(parameter.requires_grad)
