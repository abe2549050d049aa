"""DTensor's cached results, which name process groups, in a process that destroys its groups and creates others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint_ranks import started
from fsdp_core.testing import RankPool

WHOLE = torch.arange(16.0).view(4, 4)


def computed() -> int:
    """How often a result was in no cache; counted by torch's own caches, in C++ or in Python."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    in_python: int = propagator.propagate_op_sharding.cache.cache_info().misses
    stats = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    return in_python if stats is None else in_python + int(stats()[1])


def over_all() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return (distribute_tensor(WHOLE, mesh, [Shard(0)]) * 2).sum(0).full_tensor()


def over_two_axes(other_groups: bool) -> Tensor:
    if other_groups:  # so that the mesh's groups get other names than before
        for ranks in ([0, 3], [1, 2]):
            dist.new_group(ranks)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    doubled = distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]) * 2
    return doubled.sum(1).full_tensor() + distribute_tensor(WHOLE, mesh["second"], [Shard(0)]).sum().full_tensor()


def once(axes: int, other_groups: bool = False, stop: bool = True) -> tuple[bool, Tensor]:
    """Whether everything over all ranks was in this process's caches, and the result over so many axes."""
    runtime = started()
    before = computed()
    result = over_all()
    found = computed() == before
    if axes == 2:
        result = over_two_axes(other_groups)
    if stop:
        runtime.stop()
    else:
        dist.destroy_process_group()  # as somebody else may
    return found, result


ONE, TWO = WHOLE.sum(0) * 2, WHOLE.sum(1) * 2 + WHOLE.sum()


def test_results_are_kept_while_they_name_no_group_but_that_of_all_ranks() -> None:
    with RankPool() as pool:
        for number, (axes, other_groups, stop, found, want) in enumerate(
            [
                (1, False, True, False, ONE),
                (1, False, True, True, ONE),
                (2, False, True, True, TWO),
                (2, True, True, False, TWO),  # whose results would name the former groups
                (1, False, True, False, ONE),
                (1, False, False, True, ONE),
                (1, False, True, False, ONE),  # nobody has noted what the former groups were
            ]
        ):
            for was_found, result in pool.run(4, once, axes, other_groups, stop):
                assert was_found == found, f"in group {number}"
                torch.testing.assert_close(result, want, rtol=0, atol=0)
        assert not any(before for before, _ in pool.run(2, once, 1))  # another number of ranks
        assert all(before for before, _ in pool.run(2, once, 1))
