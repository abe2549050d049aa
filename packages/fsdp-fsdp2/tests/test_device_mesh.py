"""The mesh that users get: axes of one rank are looked up by a rank alone, and are good for torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.suite.refusals.bad_options import BOTH
from fsdp_core.testing.training import means, new_fabric, whole_batches
from fsdp_core.torch_private.process_groups import process_groups

pytestmark = pytest.mark.everything


def looked_up_on() -> Any:
    fabric = new_fabric("fsdp2", 2)
    mesh: Any = fabric.strategy.device_mesh  # type: ignore[attr-defined]
    groups = process_groups()
    sizes = [mesh["tensor_parallel"].size() for _ in range(3)] if fabric.global_rank == 1 else [1] * 3
    made = process_groups() - groups
    assert mesh["tensor_parallel"] is mesh["tensor_parallel"]
    assert mesh["data_parallel_replicate", "tensor_parallel"].shape == (1, 1)
    assert mesh["tensor_parallel"].mesh.tolist() == [fabric.global_rank]
    assert mesh["tensor_parallel"].get_group().size() == 1
    net = oracle.new_net()
    for block in net.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data_parallel"], ignored_params={block.gain})
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    losses = run_steps(model, optimizer, whole_batches(fabric, 2), fabric.backward)
    return sizes, made, (means(losses), full_state(fabric.strategy))


def test_axis_of_one_rank(ranks: RankPool) -> None:
    got = ranks.run(2, looked_up_on, timeout=60.0)
    for rank, (sizes, made, _) in enumerate(got):
        assert (sizes, made) == ([1] * 3, rank)
    assert_same([trained for *_, trained in got], oracle.train_plain(2, oracle.adamw_groups))


def looked_at_on() -> int:
    fabric = new_fabric("fsdp2", 2, {"tensor_parallel_size": 2, "tp_plan": {"*.up": ColwiseParallel()}})
    strategy: Any = fabric.strategy
    size = strategy.device_mesh.size() if fabric.global_rank == 0 else 2
    fabric.barrier()
    return int(size)


def test_mesh_that_one_rank_looks_at(ranks: RankPool) -> None:
    assert ranks.run(2, looked_at_on, timeout=60.0) == [2, 2]


@BOTH
def test_mesh_before_the_ranks_have_joined(front_end: FrontEnd) -> None:
    strategy = fsdp_core.resolve("fsdp2", front_end)()
    with pytest.raises(ShardingError, match=r"before the ranks have joined(?s:.*)fabric\.launch\(\)"):
        strategy.device_mesh  # noqa: B018
