"""The user's view of a module whose units FSDP1 has wrapped and whose parameters it has flattened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core.sharding import ParameterOrders, by_user_names, stand_ins_in_place, unwrapped
from fsdp_core.state import FlatRange, Layout, Part, clean_name, stand_in
from fsdp_cuda_native.torch_private.flat_parameters.units import FlatMember, flat_members, tied_members, units_of

__all__ = ["as_user_wrote", "layout_of", "local_part", "local_parts", "named_members"]


def named_members(root: FSDP) -> Iterator[tuple[str, FlatMember]]:
    """The flattened parameters by the user's names."""
    return by_user_names(root.module, (member for unit in units_of(root) for member in flat_members(unit)))


def layout_of(root: FSDP) -> Layout:
    """The parts of the user's parameters in each parameter that an optimizer may hold. The root must be sharded."""
    parts: dict[nn.Parameter, tuple[Part, ...]] = {}
    for name, member in named_members(root):
        flat_range = FlatRange(offset=member.offset, start=member.start, length=member.length, replica=member.replica)
        part = Part(
            name=name,
            shape=member.shape,
            range=flat_range if member.is_flat else None,
            separated_by="use_orig_params=True",
        )
        parts[member.optimizer_param] = (*parts.get(member.optimizer_param, ()), part)
    for name, parameter in root.module.named_parameters():
        if parameter not in parts:  # no unit has flattened it
            parts[parameter] = (Part(name=clean_name(name), shape=tuple(parameter.shape)),)
    return parts


def local_parts(root: FSDP) -> Iterator[tuple[str, Part, torch.Tensor]]:
    """For each flattened parameter, its name, where this rank's elements are in its unit's shard, and that shard."""
    for name, member in named_members(root):
        yield name, local_part(name, member), member.local_shard


def local_part(name: str, member: FlatMember) -> Part:
    """The location of this rank's elements of a flattened parameter in its unit's shard."""
    flat_range = FlatRange(offset=member.shard_offset, start=member.start, length=member.length, replica=member.replica)
    return Part(name=name, shape=member.shape, range=flat_range)


@contextmanager
def as_user_wrote(root: FSDP, orders: ParameterOrders) -> Iterator[dict[str, nn.Parameter]]:
    """Context in which modules are the user's own, without FSDP1's, and parameters have their shapes but no memory.

    Freezing and unfreezing in the context persists.

    Args:
        root: The root, sharded.
        orders: The result of :func:`fsdp_core.sharding.parameter_orders` before anything was flattened.

    Yields:
        The stand-in parameters by the user's names.
    """
    units = list(units_of(root))
    members = dict(named_members(root))
    stand_in_params = {name: stand_in(member.shape, member.optimizer_param) for name, member in members.items()}
    with (
        stand_ins_in_place(
            stand_in_params,
            {name: (member, member.optimizer_param) for name, member in members.items()},
            ties=[tie for unit in units for tie in tied_members(unit)],
            orders=orders,
            holders=[unit.module for unit in units],
            is_flat=lambda name, _: name == "_flat_param",
        ),
        unwrapped(root.module, lambda module: module.module if isinstance(module, FSDP) else None),
    ):
        yield stand_in_params
