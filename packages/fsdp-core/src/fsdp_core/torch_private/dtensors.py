"""DTensors, and what torch caches of their meshes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh

# Which groups there are, and how many torch has named; no public name counts those that were destroyed since.
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor, _redistribute

# What fully_shard places a parameter as that tensor parallelism has sharded along the same dimension; no public name.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from fsdp_core.devices import is_accelerator
from fsdp_core.mesh import DATA_AXES

__all__ = [
    "StridedShard",
    "call_before_parts",
    "checks_class_of_views",
    "data_replicas",
    "forget_call_before_parts",
    "forget_meshes",
    "is_first_slice",
    "note_meshes",
    "refuse_unreduced_values",
    "root_mesh",
]


@dataclass(frozen=True)
class _CachedMeshes:
    """A record that all meshes in DTensor's caches are of all ranks.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        results: How many results were cached so far.
    """

    rank: int
    world_size: int
    results: tuple[int, ...]


_cached_meshes: _CachedMeshes | None = None


_group_with_clean_caches: weakref.ref[Any] | None = None


def forget_meshes(device: torch.device) -> None:
    """Clear what DTensor has cached by mesh. Called when a process group was created.

    Each thread has caches of its own, and backward passes on an accelerator run in a thread of autograd's.

    Meshes are equal if their ranks are, whatever their process groups. After a process group was destroyed and another
    was created, cached results would name groups of the former one, and torch gives the same names to other groups.

    Nothing is cleared if :func:`note_meshes` has found that the only group was that of all ranks, and the new group has
    as many ranks: the name of that group is always the same. A process that trains again then keeps its caches.

    Args:
        device: The device of this rank.
    """
    global _cached_meshes, _group_with_clean_caches
    meshes = device_mesh._mesh_resources
    for mapping in ("root_to_flatten_mapping", "flatten_name_to_root_dims"):  # of joined axes; only in torch 2.9
        getattr(meshes, mapping, {}).clear()
    cached_before = _cached_meshes
    _cached_meshes = None
    _group_with_clean_caches = weakref.ref(dist.group.WORLD)
    if cached_before == _CachedMeshes(dist.get_rank(), dist.get_world_size(), _count_uncached()):
        return
    _clear_caches_of_thread()
    if is_accelerator(device):
        with torch.inference_mode(False), torch.enable_grad():
            function: Any = _InThreadOfDevice
            function.apply(torch.zeros(1, device=device, requires_grad=True)).backward()
    _redistribute._gen_transform_infos.cache_clear()


class _InThreadOfDevice(torch.autograd.Function):
    """A function whose backward pass clears the caches of the thread that it runs in."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _clear_caches_of_thread()
        return gradient


def _clear_caches_of_thread() -> None:
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in torch 2.9
    if clear is not None:
        clear()


def note_meshes() -> None:
    """Note for :func:`forget_meshes` whether all meshes in DTensor's caches are of all ranks.

    Called before all process groups are destroyed. torch counts the groups that it gives a name; it begins anew after
    their destruction.
    """
    global _cached_meshes
    _cached_meshes = None
    clean = _group_with_clean_caches is not None and _group_with_clean_caches() is dist.group.WORLD
    if clean and _world.group_count == len(_world.pg_names) == 1:
        _cached_meshes = _CachedMeshes(dist.get_rank(), dist.get_world_size(), _count_uncached())


def _count_uncached() -> tuple[int, ...]:
    """How many results were computed because they were in none of the caches."""
    propagated = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache
    computed = propagated.cache_info().misses, _redistribute._gen_transform_infos.cache_info().misses
    statistics = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)  # not in torch 2.9
    return computed if statistics is None else (*computed, statistics()[1])


def root_mesh(mesh: device_mesh.DeviceMesh) -> device_mesh.DeviceMesh:
    """The mesh that a mesh is a slice of; itself, if it is no slice. torch 2.9 keeps it elsewhere than later versions.

    A DTensor on a slice has a copy on each of the others, which only the larger mesh knows of.
    """
    find = getattr(mesh, "_get_root_mesh", None)
    root: device_mesh.DeviceMesh = find() if find is not None else device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def is_first_slice(mesh: device_mesh.DeviceMesh) -> bool:
    """Whether a mesh is the first of the slices of a larger one along its axes; true for a mesh that is no slice."""
    root = root_mesh(mesh)
    return root is mesh or int(root.mesh.min()) == int(mesh.mesh.min())


def refuse_unreduced_values(refusal: Callable[[], Exception] | None) -> None:
    """Make ``float()`` and the like raise for a DTensor with an unreduced (``Partial``) value, such as a norm.

    torch silently reads this rank's own part of the result. DTensor has no public hook for this.

    Args:
        refusal: Creates the exception to raise; ``None`` to restore torch's behaviour.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    op: Any = torch.ops.aten._local_scalar_dense.default
    if refusal is None:
        handlers.pop(op, None)
        return

    def read(op_call: Any, args: Any, kwargs: Any) -> Any:
        (value,) = args
        axes = zip(value.placements, value.device_mesh.shape, strict=True)
        if any(placement.is_partial() and size > 1 for placement, size in axes):
            raise refusal()
        return op_call(value._local_tensor)

    handlers[op] = read


def checks_class_of_views() -> bool:
    """Whether torch refuses views of a DTensor of a subclass, as it did before it computed with DTensors in C++."""
    return "_op_dispatcher" in inspect.unwrap(DTensor.__torch_dispatch__).__code__.co_names


#: What is called before somebody gets the part of a DTensor that this rank holds.
_before_parts: list[Callable[[], Any]] = []


_to_local = DTensor.to_local


def call_before_parts(call: Callable[[], Any]) -> None:
    """Call a function once, before the next call of ``DTensor.to_local()``, unless it is forgotten by then.

    ``weight.detach().to_local()`` shares memory with the weight, and writes to it are counted nowhere else. There is no
    hook for it; the method is replaced only as long as something waits for it.
    """
    _before_parts.append(call)
    DTensor.to_local = _to_local_after_calls  # type: ignore[method-assign]


def forget_call_before_parts(call: Callable[[], Any]) -> None:
    """Forget a function of :func:`call_before_parts`, if it was not called yet."""
    _before_parts[:] = [waiting for waiting in _before_parts if waiting != call]
    if not _before_parts:
        DTensor.to_local = _to_local  # type: ignore[method-assign]


@functools.wraps(_to_local)
def _to_local_after_calls(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    for call in [*_before_parts]:
        call()
        forget_call_before_parts(call)
    return _to_local(self, *args, **kwargs)


def data_replicas(tensor: DTensor) -> list[Any]:
    """The process groups of the ranks that hold the same shard of a DTensor, and get different batches."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    return [
        mesh.get_group(name)
        for name, placement, size in zip(names, tensor.placements, mesh.shape, strict=False)
        if placement.is_replicate() and size > 1 and name in DATA_AXES
    ]
