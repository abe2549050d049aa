"""A module as the user wrote it, while FSDP1 has wrapped its units and flattened its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_core.state import FlatRange, Layout, Part, clean_name, stand_in
from fsdp_cuda_native.torch_private.flat_parameters import FlatMember, flat_members, tied_members, units_of

__all__ = ["layout_of", "local_part", "local_parts", "named_members", "orders_of", "stand_ins", "unwrapped"]

_FLAT = "_flat_param"


def orders_of(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[str, ...]]:
    """In which order modules were written to hold their parameters; FSDP1 takes them away and puts them back."""
    return {module: tuple(module._parameters) for module in modules if module._parameters}


def named_members(root: FullyShardedDataParallel) -> Iterator[tuple[str, FlatMember]]:
    """The flattened parameters by the user's names."""
    names: dict[nn.Module, str] = {}
    for name, module in root.module.named_modules():
        names.setdefault(module, clean_name(name))
    for unit in units_of(root):
        for member in flat_members(unit):
            prefix = names[member.owner]
            yield (f"{prefix}.{member.attribute}" if prefix else member.attribute), member


def layout_of(root: FullyShardedDataParallel) -> Layout:
    """What each parameter that an optimizer may hold has of the user's. The root must not be gathered."""
    parts: dict[nn.Parameter, tuple[Part, ...]] = {}
    for name, member in named_members(root):
        run = FlatRange(
            offset=member.offset,
            start=member.start,
            length=member.length,
            replica=member.replica,
        )
        part = Part(name=name, shape=member.shape, range=run if member.is_flat else None)
        parts[member.held] = (*parts.get(member.held, ()), part)
    for name, parameter in root.module.named_parameters():
        if parameter not in parts:  # kept whole
            parts[parameter] = (Part(name=clean_name(name), shape=tuple(parameter.shape)),)
    return parts


def local_parts(root: FullyShardedDataParallel) -> Iterator[tuple[str, Part, torch.Tensor]]:
    """This rank's elements of each flattened parameter: its name, where they lie, and the tensor they lie in."""
    for name, member in named_members(root):
        yield name, local_part(name, member), member.local[0]


def local_part(name: str, member: FlatMember) -> Part:
    """Where this rank's elements of a flattened parameter lie in its unit's shard."""
    run = FlatRange(offset=member.local[1], start=member.start, length=member.length, replica=member.replica)
    return Part(name=name, shape=member.shape, range=run)


@contextmanager
def unwrapped(module: nn.Module) -> Iterator[None]:
    """A context in which the units of ``module`` are the user's own modules again, and not FSDP1's wrappers."""
    taken: list[tuple[nn.Module, str, FullyShardedDataParallel]] = []
    for parent in list(module.modules()):
        if isinstance(parent, FullyShardedDataParallel):
            continue
        for name, child in parent._modules.items():
            if isinstance(child, FullyShardedDataParallel):
                taken.append((parent, name, child))
    for parent, name, child in taken:
        parent._modules[name] = child.module
    try:
        yield
    finally:
        for parent, name, child in taken:
            parent._modules[name] = child


@contextmanager
def stand_ins(
    root: FullyShardedDataParallel, orders: Mapping[nn.Module, tuple[str, ...]]
) -> Iterator[dict[str, nn.Parameter]]:
    """A context in which every flattened parameter is stood for by one of its own shape, which takes no memory.

    What is frozen or unfrozen meanwhile is afterwards.

    Args:
        root: The root, not gathered.
        orders: What :func:`orders_of` has found before anything was flattened.

    Yields:
        The stand-ins by the user's names.
    """
    by_name: dict[str, nn.Parameter] = {}
    by_place: dict[tuple[int, str], nn.Parameter] = {}
    held: dict[str, nn.Parameter] = {}
    before: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def put(owner: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
        by_place[id(owner), attribute] = parameter
        if owner not in before:
            before[owner] = dict(owner._parameters)

    for name, member in named_members(root):
        by_name[name] = stand_in(member.shape, member.held)
        held[name] = member.held
        put(member.owner, member.attribute, by_name[name])
    for unit in units_of(root):
        for owner, attribute, first, first_attribute in tied_members(unit):
            put(owner, attribute, by_place[id(first), first_attribute])
        if unit.module not in before:
            before[unit.module] = dict(unit.module._parameters)
    hidden: list[tuple[nn.Module, str, object]] = []
    for owner, parameters in before.items():
        owner._parameters.clear()
        for name in dict.fromkeys((*orders.get(owner, ()), *parameters)):
            if (id(owner), name) in by_place:
                owner._parameters[name] = by_place[id(owner), name]
                if name in owner.__dict__:
                    hidden.append((owner, name, owner.__dict__.pop(name)))
            elif name != _FLAT and name in parameters:
                owner._parameters[name] = parameters[name]
    frozen = {name: parameter.requires_grad for name, parameter in by_name.items()}
    try:
        yield by_name
    finally:
        for owner, parameters in before.items():
            owner._parameters.clear()
            owner._parameters.update(parameters)
        for owner, name, value in hidden:
            owner.__dict__[name] = value
        for name, parameter in by_name.items():
            if parameter.requires_grad != frozen[name]:
                held[name].requires_grad_(parameter.requires_grad)
