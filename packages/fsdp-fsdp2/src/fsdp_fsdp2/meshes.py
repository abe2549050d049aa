"""The mesh as torch's ``DeviceMesh``, which ``fully_shard`` and tensor parallelism take, and the option about it."""

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
    "ranks_along",
    "sharding_mesh",
    "sizes_by_position",
]


class AxesMesh(DeviceMesh):
    """A mesh with those axes that have more than one rank, and ``data_parallel``; the others can be looked up too.

    So ``mesh["tensor_parallel"].size()`` is 1 without tensor parallelism, as in Lightning's ``ModelParallelStrategy``.
    A rank may look an axis up by itself, however often.
    """

    _left_out: dict[tuple[str, ...], DeviceMesh] | None = None

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        axes = (names,) if isinstance(names, str) else tuple(names)
        left_out = [name for name in axes if name in MESH_AXES and name not in (self.mesh_dim_names or ())]
        if not left_out:
            return super().__getitem__(names)
        remaining = tuple(name for name in axes if name not in left_out)
        if remaining:
            example = remaining if len(remaining) > 1 else remaining[0]
            raise KeyError(
                f"the mesh axes {', '.join(left_out)} have one rank, and can't be sliced together with others.\n"
                f"Write device_mesh[{example!r}], and device_mesh[{left_out[0]!r}] apart."
            )
        self._left_out = self._left_out or {}
        if axes not in self._left_out:
            self._left_out[axes] = self._of_one_rank(axes)
        return self._left_out[axes]

    def _of_one_rank(self, names: tuple[str, ...]) -> DeviceMesh:
        """Axes of this rank alone, as a slice of a mesh of all ranks, which torch combines with slices of this one."""
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)  # no other rank takes part
        assert dist.group.WORLD is not None
        rows = torch.arange(dist.get_world_size()).view(-1, *[1] * len(names))
        groups = [dist.group.WORLD, *[alone] * len(names)]
        return DeviceMesh.from_group(groups, self.device_type, rows, mesh_dim_names=("ranks", *names))[names]


def ranks_along(mesh: DeviceMesh, axis: int) -> set[int]:
    """The ranks that differ from this one along an axis of a mesh only, itself included."""
    index: list[Any] = list(mesh.get_coordinate() or ())
    index[axis] = slice(None)
    return set(mesh.mesh[tuple(index)].tolist())


def sharding_mesh(mesh: DeviceMesh, axes: Mesh) -> DeviceMesh:
    """The ranks that ``fully_shard`` shards over, context-parallel ones included, after those it replicates over.

    All ranks must call it: it creates process groups.

    Args:
        mesh: The whole mesh.
        axes: Its sizes.
    """
    shards = mesh["data_parallel"]
    if axes.context_parallel > 1:
        shards = joined_axes(mesh["data_parallel", "context_parallel"], "data_and_context_parallel")
    if axes.data_parallel_replicate == 1:
        return shards
    return side_by_side(mesh["data_parallel_replicate"], shards, mesh)


def device_mesh(runtime: Runtime) -> AxesMesh:
    """The ``DeviceMesh`` of a runtime's mesh. All ranks must call it: it creates process groups."""
    sizes: dict[MeshAxis, Any] = {axis: getattr(runtime.mesh, axis) for axis in MESH_AXES}
    axes = tuple(axis for axis in MESH_AXES if sizes[axis] > 1 or axis == "data_parallel")
    ranks = torch.arange(runtime.world_size).view(*[sizes[axis] for axis in axes])
    return AxesMesh(runtime.device.type, ranks, mesh_dim_names=axes)


def sizes_by_position(sizes: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sizes that a strategy was given by position, as NeMo's and Lightning's ``ModelParallelStrategy`` take them.

    Args:
        sizes: What was given by position.
        options: The sizes that may be, in their order, with what was given by keyword.

    Returns:
        The sizes, in that order.

    Raises:
        UnsupportedCapabilityError: More was given by position, or a size in both ways.

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
    """Refuse options about an axis whose size was not given: without it there is no such axis, and they do nothing.

    A size of 1 that was written is no mistake: a script keeps its other options where it runs on one device.

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
    """Refuse what says nothing about when gradients are reduced.

    Raises:
        UnsupportedCapabilityError: The value is not known, or there are no replicas.
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
