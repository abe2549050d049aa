"""Random numbers of DTensors. torch draws them for shards on CUDA alone; elsewhere each rank draws numbers of its own.

On CUDA, numbers are the same on ranks that hold the same shard as long as all ranks have drawn as many before, which
batches of different lengths end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.mesh import MeshAxis
from fsdp_core.torch_private.dtensors import root_mesh
from fsdp_core.torch_private.random_numbers import draw_for_shard, send_to_replicas

__all__ = ["draw_for_shards"]

_ATEN: Any = torch.ops.aten

#: What torch draws for DTensors, from its list ``_random_ops`` and beside that.
_DRAWING = (
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.native_dropout.default, _ATEN.bernoulli_.float),
    *(_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype),
    *(_ATEN.bernoulli.default, _ATEN.log_normal_.default, _ATEN.exponential_.default, _ATEN.geometric_.default),
)

_TENSOR_PARALLEL: MeshAxis = "tensor_parallel"


def draw_for_shards() -> None:
    """Let each shard of a DTensor have its own random numbers, the same on all ranks that hold it. Idempotent."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for func in _DRAWING:
        handlers.setdefault(func, _draw)


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces an operation that draws numbers."""
    source: DTensor = args[0]
    local = source._local_tensor
    if local.is_meta or type(local) is not Tensor:  # nothing is drawn, or a compiler looks on
        return _draw_as_torch(func, args, kwargs)
    if hasattr(torch.get_device_module(local.device), "set_rng_state") and local.device.type != "cpu":
        result = _draw_as_torch(func, args, kwargs)
        if func is _ATEN.native_dropout.default:
            return result  # of activations, for which torch's way is right: nothing is trained of them
    else:
        # torch takes no notice of a generator here
        with draw_for_shard(_shard_index(source), local.device, kwargs.get("generator")):
            result = _draw_as_torch(func, args, kwargs)
    drawn: list[DTensor] = [result] if isinstance(result, DTensor) else list(result)
    for group in _groups_of_replicas(source):
        send_to_replicas([each._local_tensor for each in drawn], group)
    return result


def _draw_as_torch(func: Any, args: Any, kwargs: Any) -> Any:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(func, None)
    try:
        return func(*args, **kwargs)
    finally:
        handlers[func] = _draw


def _shard_index(tensor: DTensor) -> int:
    """The index of this rank's shard among those of a DTensor."""
    index = 0
    mesh = tensor.device_mesh
    for placement, size, coordinate in zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=False):
        if not placement.is_replicate():
            index = index * size + coordinate
    return index


def _groups_of_replicas(tensor: DTensor) -> list[Any]:
    """The process groups of the ranks that hold the same shard of a DTensor, along each axis of its mesh.

    A parameter that tensor parallelism does not divide is a DTensor on a slice of the mesh, with a copy on the others.
    """
    mesh = tensor.device_mesh
    axes = enumerate(zip(tensor.placements, mesh.shape, strict=True))
    groups = [mesh.get_group(axis) for axis, (placement, size) in axes if placement.is_replicate() and size > 1]
    root = root_mesh(mesh)
    if _TENSOR_PARALLEL in (root.mesh_dim_names or ()) and _TENSOR_PARALLEL not in (mesh.mesh_dim_names or ()):
        groups.append(root.get_group(_TENSOR_PARALLEL))
    return groups
