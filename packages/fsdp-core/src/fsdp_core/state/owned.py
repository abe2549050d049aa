"""The state of an optimizer that updates each parameter on one rank, its owner, which holds its full state."""

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

    def is_own(self, parameter: Tensor) -> bool:
        """Whether this rank is a parameter's owner."""
        return self.by_parameter.get(cast("nn.Parameter", parameter)) == self.rank

    def rank_of_group(self, parameters: Iterable[Tensor]) -> int:
        """The rank whose settings of a param group are current: the first rank that steps over one of its members."""
        return min((self.by_parameter[cast("nn.Parameter", p)] for p in parameters), default=0)


_owners: WeakKeyDictionary[torch.optim.Optimizer, Owners] = WeakKeyDictionary()


def set_owners(optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    """Record that an optimizer's state is held by owners."""
    _owners[optimizer] = owners


def owners_of(optimizer: torch.optim.Optimizer) -> Owners | None:
    """Return the owners of an optimizer's state; ``None`` if each rank holds that of its shards."""
    return _owners.get(optimizer)


@dataclass(frozen=True)
class _TensorSpec:
    """The shape and dtype of a tensor, for ranks that do not hold it."""

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
        if values and owners.is_own(p)
    }
    descriptions: dict[str, Any] = {}
    for descriptions_of_rank in (
        runtime.gather_objects_to({name: _describe_shapes(values) for name, values in own_state.items()}) or ()
    ):
        descriptions.update(descriptions_of_rank)
    descriptions = runtime.broadcast_object(descriptions)
    names = [layout[cast("nn.Parameter", p)][0].name for g in optimizer.param_groups for p in g["params"]]
    return {name: _describe_value(own_state.get(name), descriptions[name]) for name in names if name in descriptions}


def owned_groups(optimizer: torch.optim.Optimizer, owners: Owners, runtime: Runtime) -> list[dict[str, Any]]:
    """Return the param groups' settings, each from a rank that has stepped over one of its members."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    settings_by_rank = runtime.gather_objects_to(settings)
    chosen_settings: list[dict[str, Any]] = []
    if settings_by_rank is not None:
        for index, group in enumerate(optimizer.param_groups):
            chosen_settings.append(settings_by_rank[owners.rank_of_group(group["params"])][index])
    chosen_settings = runtime.broadcast_object(chosen_settings)
    return chosen_settings


def _describe_shapes(value: Any) -> Any:
    """Return a value with the shapes and dtypes of tensors instead of the tensors."""
    if isinstance(value, Tensor):
        return _TensorSpec(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _describe_shapes(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        members = [_describe_shapes(member) for member in value]
        return tuple(members) if isinstance(value, tuple) else members
    return value


def _describe_value(value: Any, description: Any) -> Any:
    """Return a description with chunks for shapes; ``value`` is the state that it describes, ``None`` off the owner."""
    if isinstance(description, _TensorSpec):
        (shape, dtype) = (description.shape, description.dtype)
        if not isinstance(value, Tensor):  # not the owner: copy 1, because copy 0 is what is written
            return ChunkedTensor(shape=shape, dtype=dtype, chunks=(), replica=1)
        chunks = () if 0 in shape else (Chunk(offsets=(0,) * len(shape), data=value.detach()),)
        return ChunkedTensor(shape=shape, dtype=dtype, chunks=chunks)
    if isinstance(description, dict):
        return {
            key: _describe_value(None if value is None else value[key], member) for key, member in description.items()
        }
    if isinstance(description, list | tuple):
        own_members = [None] * len(description) if value is None else value
        members = [
            _describe_value(own_member, member) for own_member, member in zip(own_members, description, strict=True)
        ]
        return tuple(members) if isinstance(description, tuple) else members
    return description
