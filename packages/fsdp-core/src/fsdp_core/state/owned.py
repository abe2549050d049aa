"""The state of an optimizer whose parameters are each updated on one rank, their owner, which holds it whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import Chunk, ChunkedTensor
from fsdp_core.state.layout import Layout

__all__ = ["Owners", "owned_groups", "owned_state", "owners_of", "set_owners"]


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Which rank holds the state of each parameter of an optimizer.

    Attributes:
        rank: This rank.
        by_parameter: The owner of each sharded parameter that the optimizer holds.
    """

    rank: int
    by_parameter: Mapping[nn.Parameter, int]

    def is_mine(self, parameter: Tensor) -> bool:
        """Whether this rank is a parameter's owner."""
        return self.by_parameter.get(cast("nn.Parameter", parameter)) == self.rank

    def of_group(self, parameters: Iterable[Tensor]) -> int:
        """The rank whose settings of a param group have followed all steps: the first that owns one of its members."""
        return min((self.by_parameter[cast("nn.Parameter", p)] for p in parameters), default=0)


_owners: WeakKeyDictionary[torch.optim.Optimizer, Owners] = WeakKeyDictionary()


def set_owners(optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    """Record that an optimizer's state is held by owners."""
    _owners[optimizer] = owners


def owners_of(optimizer: torch.optim.Optimizer) -> Owners | None:
    """Return the owners of an optimizer's state; ``None`` if each rank holds that of its shards."""
    return _owners.get(optimizer)


@dataclass(frozen=True)
class _Elsewhere:
    """A tensor of another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def owned_state(
    optimizer: torch.optim.Optimizer, layout: Layout, owners: Owners, runtime: Runtime
) -> dict[str, dict[str, Any]]:
    """Describe an optimizer's state by parameter name, the same names and keys on every rank. All ranks must call it.

    Args:
        optimizer: The optimizer, whose state is keyed by the sharded parameters, on their owners.
        layout: How its parameters map to the user's.
        owners: Who owns what.
        runtime: The ranks.

    Returns:
        By name and key, plain values, and chunks that hold the whole tensor on its owner, and nothing elsewhere.
    """
    own_state = {
        layout[cast("nn.Parameter", p)][0].name: values
        for p, values in optimizer.state.items()
        if values and owners.is_mine(p)
    }
    outlines: dict[str, Any] = {}
    for outlines_of_rank in (
        runtime.gather_objects_to({name: _outline(values) for name, values in own_state.items()}) or ()
    ):
        outlines.update(outlines_of_rank)
    outlines = runtime.broadcast_object(outlines)
    names = [layout[cast("nn.Parameter", p)][0].name for g in optimizer.param_groups for p in g["params"]]
    return {name: _describe_value(own_state.get(name), outlines[name]) for name in names if name in outlines}


def owned_groups(optimizer: torch.optim.Optimizer, owners: Owners, runtime: Runtime) -> list[dict[str, Any]]:
    """Return the param groups' settings, each from a rank that has stepped over one of its members."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    by_rank = runtime.gather_objects_to(settings)
    chosen: list[dict[str, Any]] = []
    if by_rank is not None:
        groups = enumerate(optimizer.param_groups)
        chosen = [by_rank[owners.of_group(group["params"])][index] for index, group in groups]
    chosen = runtime.broadcast_object(chosen)
    return chosen


def _outline(value: Any) -> Any:
    """A value without the memory of its tensors."""
    if isinstance(value, Tensor):
        return _Elsewhere(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _outline(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        members = [_outline(member) for member in value]
        return tuple(members) if isinstance(value, tuple) else members
    return value


def _describe_value(value: Any, outline: Any) -> Any:
    if isinstance(outline, _Elsewhere):
        data = value.detach() if isinstance(value, Tensor) else None
        has = data is not None and 0 not in outline.shape
        chunks = (Chunk(offsets=(0,) * len(outline.shape), data=data),) if has and data is not None else ()
        return ChunkedTensor(shape=outline.shape, dtype=outline.dtype, chunks=chunks, replica=int(data is None))
    if isinstance(outline, dict):
        return {key: _describe_value(None if value is None else value[key], member) for key, member in outline.items()}
    if isinstance(outline, list | tuple):
        own_members = [None] * len(outline) if value is None else value
        members = [_describe_value(own_member, member) for own_member, member in zip(own_members, outline, strict=True)]
        return tuple(members) if isinstance(outline, tuple) else members
    return outline
