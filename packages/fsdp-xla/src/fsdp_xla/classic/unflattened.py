"""The user's view of a module whose units XlaFullyShardedDataParallel has wrapped and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_core.sharding import ParameterOrders, by_user_names, stand_ins_in_place, unwrapped
from fsdp_core.state import FlatRange, Layout, Part
from fsdp_xla.torch_xla_private.units import (
    ShardedMember,
    XlaFullyShardedDataParallel,
    is_shard,
    sharded_members,
    tied_members,
    units_of,
)

__all__ = ["as_user_wrote", "layout_of", "named_members", "user_module"]


def user_module(unit: nn.Module) -> nn.Module:
    """The user's module in a wrapper. Any other module is returned unchanged."""
    if not isinstance(unit, XlaFullyShardedDataParallel):
        return unit
    inner: nn.Module = unit.module.module
    return inner


def named_members(root: nn.Module) -> Iterator[tuple[str, ShardedMember]]:
    """The sharded parameters by the user's names."""
    return by_user_names(root, (member for unit in units_of(root) for member in sharded_members(unit)))


def layout_of(root: nn.Module) -> Layout:
    """The parts of the user's parameters in each sharded parameter, flattened."""
    parts: dict[nn.Parameter, tuple[Part, ...]] = {}
    for name, member in named_members(root):
        flat_range = FlatRange(offset=member.offset, start=member.start, length=member.length)
        part = Part(name=name, shape=member.shape, range=flat_range, separated_by="flatten_parameters=False")
        parts[member.shard] = (*parts.get(member.shard, ()), part)
    return parts


@contextmanager
def as_user_wrote(root: nn.Module, orders: ParameterOrders) -> Iterator[dict[str, nn.Parameter]]:
    """Context in which units are the user's own modules, and parameters have their original shapes without memory.

    Freezing and unfreezing in the context persists.

    Args:
        root: The root.
        orders: The result of :func:`fsdp_core.sharding.parameter_orders` before anything was flattened.

    Yields:
        The stand-in parameters by the user's names.
    """
    members = {name: (member, member.shard) for name, member in named_members(root)}
    stand_ins: dict[str, nn.Parameter] = {}
    for name, (member, shard) in members.items():
        data = torch.full((), torch.nan, dtype=shard.dtype).expand(member.shape)  # in host memory
        stand_ins[name] = nn.Parameter(data, requires_grad=shard.requires_grad)
    with (
        stand_ins_in_place(
            stand_ins,
            members,
            ties=[tie for unit in units_of(root) for tie in tied_members(unit)],
            orders=orders,
            holders=(root, user_module(root)),
            is_flat=lambda _, parameter: parameter is not None and is_shard(parameter),
        ),
        unwrapped(root, _wrapped_module),
    ):
        yield stand_ins


def _wrapped_module(module: nn.Module) -> nn.Module | None:
    return user_module(module) if isinstance(module, XlaFullyShardedDataParallel) else None
