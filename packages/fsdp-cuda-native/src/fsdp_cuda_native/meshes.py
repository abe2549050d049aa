"""The ranks over which parameters are sharded, and those over which they are replicated."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_core import Runtime, UnsupportedCapabilityError
from fsdp_cuda_native.options import HYBRID

__all__ = ["ranks_to_shard_over"]


def ranks_to_shard_over(
    strategy: ShardingStrategy, process_group: Any, mesh: Any, policy_is_given: bool, runtime: Runtime
) -> dict[str, Any]:
    """Keyword arguments for ``FullyShardedDataParallel``: a mesh, a process group, or none for all ranks.

    Args:
        strategy: The sharding strategy.
        process_group: The user's option: for hybrid sharding a pair, the ranks to shard over and those to replicate
            over.
        mesh: The user's option: a mesh or its shape, for hybrid sharding ``(replicas, ranks of each)``.
        policy_is_given: Whether the user passed an ``auto_wrap_policy``. Hybrid sharding may then shard over the ranks
            of each host, as torch does.
        runtime: All ranks.

    Raises:
        UnsupportedCapabilityError: The mesh or the groups do not fit the sharding strategy or the ranks.
    """
    hybrid = strategy in HYBRID
    if process_group is not None:
        _check_groups(process_group, strategy, runtime)
        return {"process_group": process_group}
    if hybrid and mesh is None:
        if not policy_is_given:
            raise UnsupportedCapabilityError(
                f"sharding_strategy={strategy.name.strip('_')!r} needs to know which ranks to shard over.\n"
                f"Write device_mesh=(replicas, ranks of each), such as (2, {max(1, runtime.world_size // 2)}), "
                "or a process_group pair; or auto_wrap_policy={MyBlock}, to shard over the ranks of each host."
            )
        mesh = _shape_by_host(runtime)
    if mesh is None:
        return {}
    shape = tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)
    if hybrid:
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
    names = ("replicate", "shard") if hybrid else ("shard",)
    return {"device_mesh": init_device_mesh(runtime.device.type, shape, mesh_dim_names=names)}


def _check_groups(process_group: Any, strategy: ShardingStrategy, runtime: Runtime) -> None:
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
    shards, replicas = (dist.get_world_size(group) for group in pair)
    if shards * replicas != runtime.world_size or (shards == 1 and runtime.world_size > 1):
        raise UnsupportedCapabilityError(
            f"process_group=(a group of {shards}, a group of {replicas}) does not divide {runtime.world_size} ranks "
            f"into replicas that {strategy.name} shards.\n"
            "Write process_group=(ranks to shard over, ranks to replicate over), the two sizes multiplying to the "
            "number of ranks and the first more than 1; or device_mesh=(replicas, ranks of each)."
        )


def _check_hybrid(shape: tuple[int, ...], strategy: ShardingStrategy, runtime: Runtime) -> None:
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
