"""A module as the user wrote it, while FSDP1 has wrapped its units and flattened its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_core.sharding import ParameterOrders, by_user_names, stand_ins_in_place, unwrapped
from fsdp_core.state import FlatRange, Layout, Part, clean_name, stand_in
from fsdp_cuda_native.torch_private.flat_parameters import FlatMember, flat_members, tied_members, units_of

__all__ = ["as_user_wrote", "layout_of", "local_part", "local_parts", "named_members"]


def named_members(root: FullyShardedDataParallel) -> Iterator[tuple[str, FlatMember]]:
    """The flattened parameters by the user's names."""
    return by_user_names(root.module, (member for unit in units_of(root) for member in flat_members(unit)))


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
def as_user_wrote(root: FullyShardedDataParallel, orders: ParameterOrders) -> Iterator[dict[str, nn.Parameter]]:
    """A context in which units are the user's own modules, and parameters have their shapes but take no memory.

    What is frozen or unfrozen meanwhile is afterwards.

    Args:
        root: The root, not gathered.
        orders: What :func:`fsdp_core.sharding.parameter_orders` has found before anything was flattened.

    Yields:
        The parameters that stand in, by the user's names.
    """
    units = list(units_of(root))
    members = {name: (member, member.held) for name, member in named_members(root)}
    shown = {name: stand_in(member.shape, held) for name, (member, held) in members.items()}
    with (
        stand_ins_in_place(
            shown,
            members,
            ties=[tie for unit in units for tie in tied_members(unit)],
            orders=orders,
            holders=[unit.module for unit in units],
            is_flat=lambda name, _: name == "_flat_param",
        ),
        unwrapped(root.module, lambda one: one.module if isinstance(one, FullyShardedDataParallel) else None),
    ):
        yield shown
