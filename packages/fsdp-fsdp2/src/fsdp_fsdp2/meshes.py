"""The mesh as torch's ``DeviceMesh``, which ``fully_shard`` and tensor parallelism take, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core import Runtime, UnsupportedCapabilityError
from fsdp_core.sharding import MESH_AXES, Mesh, MeshAxis
from fsdp_fsdp2.torch_private.meshes import joined_axes, side_by_side

__all__ = [
    "AxesMesh",
    "check_sized",
    "check_sync",
    "device_mesh",
    "expert_sharding_mesh",
    "ranks_along",
    "sharding_mesh",
    "sizes_by_position",
]


#: The axes of the device mesh that data-parallel ranks have where experts are divided among them.
_PARTS_OF_DATA_PARALLEL: tuple[MeshAxis, MeshAxis] = ("expert_data_parallel", "expert_parallel")


class AxesMesh(DeviceMesh):
    """A mesh with those axes that have more than one rank, and ``data_parallel``; the others can be looked up too.

    So ``mesh["tensor_parallel"].size()`` is 1 without tensor parallelism, as in Lightning's ``ModelParallelStrategy``.
    A rank may look an axis up by itself, however often.

    Where experts are divided, it has ``expert_data_parallel`` and ``expert_parallel`` in the place of
    ``data_parallel``, which can be looked up.

    Attributes:
        data_parallel: These two axes as one; ``None`` without divided experts.
    """

    data_parallel: DeviceMesh | None = None

    _meshes_of_one_rank: dict[tuple[str, ...], DeviceMesh] | None = None

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        axes = (names,) if isinstance(names, str) else tuple(names)
        if self.data_parallel is not None and axes == ("data_parallel",):
            return self.data_parallel
        axes_with_ranks = (*(self.mesh_dim_names or ()), *([] if self.data_parallel is None else ["data_parallel"]))
        of_one_rank = [name for name in axes if name in MESH_AXES and name not in axes_with_ranks]
        if not of_one_rank:
            return super().__getitem__(names)
        remaining = tuple(name for name in axes if name not in of_one_rank)
        if remaining:
            example = remaining if len(remaining) > 1 else remaining[0]
            raise KeyError(
                f"the mesh axes {', '.join(of_one_rank)} have one rank, and can't be sliced together with others.\n"
                f"Write device_mesh[{example!r}], and device_mesh[{of_one_rank[0]!r}] apart."
            )
        self._meshes_of_one_rank = self._meshes_of_one_rank or {}
        if axes not in self._meshes_of_one_rank:
            self._meshes_of_one_rank[axes] = self._make_mesh_of_one_rank(axes)
        return self._meshes_of_one_rank[axes]

    def _make_mesh_of_one_rank(self, names: tuple[str, ...]) -> DeviceMesh:
        """Axes of this rank alone, as a slice of a mesh of all ranks: torch combines it with slices of this mesh."""
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)  # no other rank takes part
        assert dist.group.WORLD is not None
        rows = torch.arange(dist.get_world_size()).view(-1, *[1] * len(names))
        groups = [dist.group.WORLD, *[alone] * len(names)]
        return DeviceMesh.from_group(groups, self.device_type, rows, mesh_dim_names=("ranks", *names))[names]


def ranks_along(mesh: DeviceMesh, axis: int) -> set[int]:
    """The ranks of a mesh's line through this rank along an axis: the other coordinates are the same."""
    index: list[Any] = list(mesh.get_coordinate() or ())
    index[axis] = slice(None)
    return set(mesh.mesh[tuple(index)].tolist())


def sharding_mesh(mesh: DeviceMesh, axes: Mesh) -> DeviceMesh:
    """The mesh for ``fully_shard``: the axis to replicate over, if there are replicas, and the axis to shard over.

    The latter joins data-parallel and context-parallel ranks. All ranks must call it: it creates process groups.

    Args:
        mesh: The mesh of all ranks.
        axes: Its sizes.
    """
    data_axes = ("data_parallel",) if axes.expert_parallel == 1 else _PARTS_OF_DATA_PARALLEL
    shards = mesh["data_parallel"]
    if axes.context_parallel > 1:
        shards = joined_axes(mesh[(*data_axes, "context_parallel")], "data_and_context_parallel")
    return _with_replicas(shards, mesh, axes)


def expert_sharding_mesh(mesh: DeviceMesh, axes: Mesh) -> DeviceMesh:
    """The mesh for ``fully_shard`` of divided experts: the axes of those ranks that have the same experts.

    All ranks must call it: it creates process groups.

    Args:
        mesh: The mesh of all ranks.
        axes: Its sizes.
    """
    shards = mesh["expert_data_parallel"]
    if axes.context_parallel > 1:
        shards = joined_axes(mesh["expert_data_parallel", "context_parallel"], "expert_data_and_context_parallel")
    return _with_replicas(shards, mesh, axes)


def _with_replicas(shards: DeviceMesh, mesh: DeviceMesh, axes: Mesh) -> DeviceMesh:
    return shards if axes.data_parallel_replicate == 1 else side_by_side(mesh["data_parallel_replicate"], shards, mesh)


def device_mesh(runtime: Runtime) -> AxesMesh:
    """The ``DeviceMesh`` of a runtime's mesh. All ranks must call it: it creates process groups."""
    sizes: dict[MeshAxis, Any] = {axis: getattr(runtime.mesh, axis) for axis in MESH_AXES}
    axes = tuple(axis for axis in MESH_AXES if sizes[axis] > 1 or axis == "data_parallel")
    ranks = torch.arange(runtime.world_size).view(*[sizes[axis] for axis in axes])
    if runtime.mesh.expert_parallel == 1:
        return AxesMesh(runtime.device.type, ranks, mesh_dim_names=axes)
    position = axes.index("data_parallel")
    sizes_of_parts = (runtime.mesh.expert_data_parallel, runtime.mesh.expert_parallel)
    ranks = ranks.unflatten(position, sizes_of_parts)
    axes = (*axes[:position], *_PARTS_OF_DATA_PARALLEL, *axes[position + 1 :])
    mesh = AxesMesh(runtime.device.type, ranks, mesh_dim_names=axes)
    mesh.data_parallel = joined_axes(mesh[_PARTS_OF_DATA_PARALLEL], "data_parallel")
    return mesh


def sizes_by_position(sizes: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes of a strategy that was given some by position, as ``ModelParallelStrategy`` of Lightning and NeMo is.

    Args:
        sizes: The sizes that were given by position.
        options: By name, in the order of positions, the sizes that were given by keyword; ``"auto"`` for the others.

    Returns:
        All sizes, in that order.

    Raises:
        UnsupportedCapabilityError: There are too many positions, or a size was given in both ways.

    Example:
        >>> sizes_by_position((2,), {"data_parallel_size": "auto", "tensor_parallel_size": 4})
        (2, 4)
    """
    by_position = dict(zip(options, sizes, strict=False))
    twice = [name for name in by_position if options[name] != "auto"]
    if len(sizes) > len(options) or twice:
        listing = ", ".join(map(repr, sizes))
        instead = ", ".join(f"{name}={value!r}" for name, value in by_position.items())
        why = f"{twice[0]} is given by keyword, too" if twice else f"only {' and '.join(options)} can be so given"
        raise UnsupportedCapabilityError(
            f"the strategy was given {listing} by position, and {why}.\nWrite keywords: {instead}, and so on."
        )
    return tuple({**options, **by_position}.values())


def check_sized(size_option: str, sizes: Mapping[str, object], **options: object) -> None:
    """Refuse options about an axis of the mesh whose size was left out: they would do nothing.

    With a size of 1 that was given they are accepted, so that a script can keep them where it runs on one device.

    Args:
        size_option: The option with the size of the axis.
        sizes: The sizes that were given, by option.
        **options: The options about that axis.

    Raises:
        UnsupportedCapabilityError: One is given, and the size is ``"auto"``.
    """
    option = next((name for name, value in options.items() if value is not None and value is not False), None)
    if option is not None and sizes[size_option] == "auto":
        raise UnsupportedCapabilityError(
            f"{option} was given without {size_option}, which is 1 by default, so it would do nothing.\n"
            f"Write {size_option}=2 or more; or {size_option}=1, which leaves {option} unused."
        )


def check_sync(sync_each_batch: object, mesh: Mesh) -> None:
    """Refuse values of ``sync_each_batch`` that are not known, or do not fit the mesh.

    Raises:
        UnsupportedCapabilityError: The value is not known, or it is about replicas, and there is one.
    """
    if not isinstance(sync_each_batch, bool) and sync_each_batch != "within_replica":
        raise UnsupportedCapabilityError(
            f"sync_each_batch={sync_each_batch!r} is not known to 'fsdp2'.\n"
            "Write False to reduce gradients once per optimizer step, True to reduce them on every micro-batch, or "
            "'within_replica' to reduce-scatter them on every micro-batch and all-reduce them once per step."
        )
    if sync_each_batch == "within_replica" and mesh.data_parallel_replicate == 1:
        raise UnsupportedCapabilityError(
            "sync_each_batch='within_replica' defers the all-reduce across replicas, and there is one replica.\n"
            "Add data_parallel_replicate_size=2 or more, or write sync_each_batch=True, which is the same with one."
        )
