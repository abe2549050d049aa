"""Partition specs: the mesh axes over which a tensor's dimensions are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from fsdp_core import ShardingError
from fsdp_core.state import named_parameters
from fsdp_xla.spmd.runtime import FSDP_AXIS, MODEL_AXIS

__all__ = ["PartitionSpec", "batch_spec", "parameter_spec", "planned_dims", "replicated_spec"]

#: By dimension: the mesh axis or axes over which it is sharded, or ``None``.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]


def parameter_spec(shape: tuple[int, ...], shards: int, model_dim: int | None = None) -> PartitionSpec:
    """Choose the dimension to shard: the largest that divides evenly, or else the largest, which XLA pads.

    Args:
        shape: The parameter's shape.
        shards: The size of the mesh axis ``"fsdp"``.
        model_dim: The dimension to shard over ``"model"``, and over ``"fsdp"`` too only if it is the only one.

    Returns:
        The mesh axes by dimension. A tensor without dimensions or without elements is replicated.

    Example:
        >>> parameter_spec((7, 8), 4), parameter_spec((7, 6), 4), parameter_spec((), 4)
        ((None, 'fsdp'), ('fsdp', None), ())
        >>> parameter_spec((8, 4), 2, model_dim=0), parameter_spec((8,), 2, model_dim=0)
        (('model', 'fsdp'), (('model', 'fsdp'),))
    """
    if not shape or 0 in shape:
        return replicated_spec(len(shape))
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    free = [dim for dim in range(len(shape)) if dim != model_dim]
    if model_dim is not None:
        spec[model_dim] = MODEL_AXIS if free else (MODEL_AXIS, FSDP_AXIS)
    if free:
        chosen = max(free, key=lambda dim: (shape[dim] % shards == 0, shape[dim], -dim))
        spec[chosen] = FSDP_AXIS
    return tuple(spec)


def batch_spec(ndim: int) -> PartitionSpec:
    """Shard the first dimension."""
    return (FSDP_AXIS, *(None,) * (ndim - 1))


def replicated_spec(ndim: int) -> PartitionSpec:
    """Replicate on every device."""
    return (None,) * ndim


def planned_dims(module: nn.Module, plan: Mapping[str, int]) -> dict[str, int]:
    """Resolve a tensor plan to the dimension of each parameter to shard.

    Args:
        module: The module whose parameters are sharded.
        plan: A dimension by name pattern, in which ``*`` matches anything. The first matching pattern applies.

    Returns:
        The dimensions by name, for parameters that match a pattern.

    Raises:
        ShardingError: A pattern matches nothing, or a parameter has no such dimension.

    Example:
        >>> planned_dims(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), {"0.*": 0, "1.weight": 1})
        {'0.weight': 0, '0.bias': 0, '1.weight': 1}
    """
    dims: dict[str, int] = {}
    matched: set[str] = set()
    for name, parameter in named_parameters(module):
        for pattern, dim in plan.items():
            if not fnmatchcase(name, pattern):
                continue
            matched.add(pattern)
            if not -parameter.ndim <= dim < parameter.ndim:
                raise ShardingError(
                    f"tensor_plan[{pattern!r}]={dim} is not a dimension of {name!r}, whose shape is "
                    f"{tuple(parameter.shape)}.\nWrite a dimension that it has, or a narrower pattern."
                )
            dims.setdefault(name, dim % parameter.ndim)
    unmatched = [pattern for pattern in plan if pattern not in matched]
    if unmatched:
        names = [name for name, _ in named_parameters(module)]
        raise ShardingError(
            f"tensor_plan[{unmatched[0]!r}] matches no parameter of {type(module).__name__}.\n"
            f"Its parameters are: {', '.join(names[:20])}{' …' if len(names) > 20 else ''}."
        )
    return dims
