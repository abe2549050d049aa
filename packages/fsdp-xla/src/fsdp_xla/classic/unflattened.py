"""A module as the user wrote it, while XlaFullyShardedDataParallel has wrapped its units and taken its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_core.state import FlatRange, Layout, Part, clean_name
from fsdp_xla.torch_xla_private.units import (
    ShardedMember,
    XlaFullyShardedDataParallel,
    is_shard,
    sharded_members,
    tied_members,
    units_of,
)

__all__ = ["layout_of", "named_members", "parameter_orders", "put_in_place", "user_module", "written"]


def parameter_orders(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[str, ...]]:
    """In which order modules hold their parameters. Sharding takes these away."""
    return {module: tuple(module._parameters) for module in modules if module._parameters}


def put_in_place(root: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Let every parent inside ``root`` hold ``wrapper``, which holds ``module``, instead of ``module``."""
    inside = set(wrapper.modules())
    for parent in [parent for parent in root.modules() if parent not in inside]:
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = wrapper


def user_module(unit: nn.Module) -> nn.Module:
    """The user's module in a wrapper; a module that is none, as it is."""
    if not isinstance(unit, XlaFullyShardedDataParallel):
        return unit
    inner: nn.Module = unit.module.module
    return inner


def named_members(root: nn.Module) -> Iterator[tuple[str, ShardedMember]]:
    """The sharded parameters by the user's names."""
    names: dict[nn.Module, str] = {}
    for name, module in root.named_modules():
        names.setdefault(module, clean_name(name))
    for unit in units_of(root):
        for member in sharded_members(unit):
            prefix = names[member.owner]
            yield (f"{prefix}.{member.attribute}" if prefix else member.attribute), member


def layout_of(root: nn.Module) -> Layout:
    """What each sharded parameter, flattened, has of the user's."""
    parts: dict[nn.Parameter, tuple[Part, ...]] = {}
    for name, member in named_members(root):
        run = FlatRange(offset=member.offset, start=member.start, length=member.length)
        part = Part(name=name, shape=member.shape, range=run)
        parts[member.shard] = (*parts.get(member.shard, ()), part)
    return parts


@contextmanager
def written(root: nn.Module, orders: Mapping[nn.Module, tuple[str, ...]]) -> Iterator[dict[str, nn.Parameter]]:
    """A context in which units are the user's own modules, and parameters have their shapes but take no memory.

    What is frozen or unfrozen meanwhile is afterwards.

    Args:
        root: The root.
        orders: In which order modules were written to hold their parameters; see :func:`parameter_orders`.

    Yields:
        The parameters that stand in, by the user's names.
    """
    by_name: dict[str, nn.Parameter] = {}
    shard_of: dict[str, nn.Parameter] = {}
    by_place: dict[nn.Module, dict[str, nn.Parameter]] = {}
    units = list(units_of(root))
    for name, member in named_members(root):
        data = torch.full((), torch.nan, dtype=member.shard.dtype).expand(member.shape)
        by_name[name] = nn.Parameter(data, requires_grad=member.shard.requires_grad)
        shard_of[name] = member.shard
        by_place.setdefault(member.owner, {})[member.attribute] = by_name[name]
    for unit in units:
        for owner, attribute, first, first_attribute in tied_members(unit):
            by_place.setdefault(owner, {})[attribute] = by_place[first][first_attribute]
    frozen = {name: not stand_in.requires_grad for name, stand_in in by_name.items()}
    hidden: list[tuple[nn.Module, str, object]] = []
    shards: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for holder in (root, user_module(root)):
        shards[holder] = {name: p for name, p in holder._parameters.items() if p is not None and is_shard(p)}
        for name in shards[holder]:
            del holder._parameters[name]
    for owner, stand_ins in by_place.items():
        for name in (*orders.get(owner, ()), *stand_ins):
            if name in stand_ins and name not in owner._parameters:
                owner._parameters[name] = stand_ins[name]
                if name in owner.__dict__:
                    hidden.append((owner, name, owner.__dict__.pop(name)))
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(root.modules()):
        if not isinstance(parent, XlaFullyShardedDataParallel):
            for name, child in parent._modules.items():
                if isinstance(child, XlaFullyShardedDataParallel):
                    wrapped.append((parent, name, child))
    for parent, name, child in wrapped:
        parent._modules[name] = user_module(child)
    try:
        yield by_name
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
        for owner, stand_ins in by_place.items():
            for name in stand_ins:
                owner._parameters.pop(name, None)
        for holder, of_holder in shards.items():
            holder._parameters.update(of_holder)
        for owner, name, value in hidden:
            owner.__dict__[name] = value
        for name, stand_in in by_name.items():
            if stand_in.requires_grad == frozen[name]:
                shard_of[name].requires_grad_(stand_in.requires_grad)
