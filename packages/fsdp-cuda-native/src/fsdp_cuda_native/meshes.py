"""The ranks over which parameters are sharded, and those over which they are replicated."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_core import Runtime, UnsupportedCapabilityError
from fsdp_cuda_native.options import HYBRID, NativeOptions

__all__ = ["mesh_arguments"]


def mesh_arguments(options: NativeOptions, runtime: Runtime, *, has_policy: bool) -> dict[str, Any]:
    """Keyword arguments for ``FullyShardedDataParallel``: a mesh, a process group, or none for all ranks.

    Args:
        options: The user's options. For hybrid sharding, ``process_group`` is a pair, of the ranks to shard over and
            those to replicate over, and ``device_mesh`` a mesh, or its shape, of replicas and the ranks of each.
        runtime: All ranks.
        has_policy: Whether the user passed an ``auto_wrap_policy``. Hybrid sharding may then shard over the ranks of
            each host, as torch does.

    Raises:
        UnsupportedCapabilityError: The mesh or the groups do not fit the sharding strategy or the ranks.
    """
    strategy = options.strategy
    mesh = options.device_mesh
    is_hybrid = strategy in HYBRID
    if options.process_group is not None:
        _check_groups(options.process_group, strategy, runtime)
        return {"process_group": options.process_group}
    if is_hybrid and mesh is None:
        if not has_policy:
            raise UnsupportedCapabilityError(
                f"sharding_strategy={strategy.name.removeprefix('_')!r} needs to know which ranks to shard over.\n"
                f"Write device_mesh=(replicas, ranks of each), such as (2, {max(1, runtime.world_size // 2)}), "
                "or a process_group pair; or auto_wrap_policy={MyBlock}, to shard over the ranks of each host."
            )
        mesh = _shape_by_host(runtime)
    if mesh is None:
        return {}
    shape = tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)
    if is_hybrid:
        _check_hybrid(shape, strategy, runtime)
    elif len(shape) != 1:
        raise UnsupportedCapabilityError(
            f"device_mesh of shape {shape} has {len(shape)} axes, and {strategy.name} shards over one.\n"
            "Write sharding_strategy='HYBRID_SHARD', or leave device_mesh out."
        )
    elif shape != (runtime.world_size,):
        raise UnsupportedCapabilityError(
            f"device_mesh of shape {shape} is not that of {runtime.world_size} ranks, and {strategy.name} shards over "
            f"all of them.\nLeave device_mesh out, or write device_mesh=({runtime.world_size},)."
        )
    if isinstance(mesh, DeviceMesh):
        return {"device_mesh": mesh}
    names = ("replicate", "shard") if is_hybrid else ("shard",)
    return {"device_mesh": init_device_mesh(runtime.device.type, shape, mesh_dim_names=names)}


def _check_groups(process_group: Any, strategy: ShardingStrategy, runtime: Runtime) -> None:
    """Refuse groups that would leave gradients of some ranks out, or nothing to shard."""
    pair = process_group if isinstance(process_group, tuple) else (process_group,)
    if strategy not in HYBRID:
        if len(pair) != 1 or dist.get_world_size(pair[0]) != runtime.world_size:
            # torch would train each group separately, and never average across groups
            raise UnsupportedCapabilityError(
                f"process_group={process_group!r} is not one group of all {runtime.world_size} ranks, over which "
                f"{strategy.name} shards and averages.\n"
                "Leave process_group out, or write sharding_strategy='HYBRID_SHARD' with "
                "process_group=(ranks to shard over, ranks to replicate over)."
            )
        return
    if len(pair) != 2:
        raise UnsupportedCapabilityError(
            f"process_group={process_group!r} is one group, and {strategy.name} needs two.\n"
            "Write process_group=(ranks to shard over, ranks to replicate over), or "
            "device_mesh=(replicas, ranks of each)."
        )
    shard_ranks, replicas = (dist.get_world_size(group) for group in pair)
    if shard_ranks * replicas != runtime.world_size or (shard_ranks == 1 and runtime.world_size > 1):
        raise UnsupportedCapabilityError(
            f"process_group=(a group of {shard_ranks}, a group of {replicas}) does not divide "
            f"{runtime.world_size} ranks into replicas that {strategy.name} shards.\n"
            "Write process_group=(ranks to shard over, ranks to replicate over), the two sizes multiplying to the "
            "number of ranks and the first more than 1; or device_mesh=(replicas, ranks of each)."
        )


def _check_hybrid(shape: tuple[int, ...], strategy: ShardingStrategy, runtime: Runtime) -> None:
    """Refuse a mesh that is not (replicas, ranks of each) of all ranks, or leaves nothing to shard."""
    if len(shape) != 2 or shape[0] * shape[1] != runtime.world_size:
        raise UnsupportedCapabilityError(
            f"device_mesh of shape {shape} does not divide {runtime.world_size} ranks into replicas that shard.\n"
            "Write device_mesh=(replicas, ranks of each), the two multiplying to the number of ranks."
        )
    if shape[1] == 1 and runtime.world_size > 1:
        # torch would fall back to NO_SHARD within each group of one, and never average across replicas
        raise UnsupportedCapabilityError(
            f"device_mesh={shape} leaves one rank to each replica, so there is nothing for {strategy.name} to shard.\n"
            "Write sharding_strategy='NO_SHARD', or strategy='ddp'."
        )


def _shape_by_host(runtime: Runtime) -> tuple[int, int]:
    """The shape of a mesh in which each host is a replica."""
    local_ranks = runtime.gather_objects(runtime.local_rank)
    ranks_per_host = max(local_ranks) + 1
    hosts = runtime.world_size // ranks_per_host
    if local_ranks != list(range(ranks_per_host)) * hosts:
        raise UnsupportedCapabilityError(
            "hosts have different numbers of ranks, so hybrid sharding can't replicate one host's shards on another.\n"
            "Write device_mesh=(replicas, ranks of each), or sharding_strategy='FULL_SHARD'."
        )
    return hosts, ranks_per_host
