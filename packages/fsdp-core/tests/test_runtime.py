"""Ranks that meet in the store of their process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from checkpoint_ranks import started
from fsdp_core import ProcessGroupRuntime, ShardingError
from fsdp_core.runtime import _check_group
from fsdp_core.testing import RankPool
from fsdp_core.testing.loopback.fabric import LoopbackFabricStrategy
from fsdp_core.testing.refusals import refusal
from fsdp_core.torch_private.process_groups import default_store


def comes_again() -> str:
    """Rank 0 comes alone, is told so, and then comes with the other."""
    runtime = started()
    told = ""
    if runtime.rank == 0:
        runtime.patience = timedelta(seconds=0.5)
        told = refusal(ShardingError, lambda: runtime.rendezvous("something"))
        runtime.patience = timedelta(seconds=60)
    dist.barrier()
    for _ in range(3):
        runtime.rendezvous("something else")
    runtime.stop()
    return told


def keys_after(meetings: int) -> int:
    runtime = started()
    for _ in range(meetings):
        runtime.rendezvous("something")
    dist.barrier()
    store = default_store()
    assert store is not None
    kept = int(store.num_keys())
    dist.barrier()
    runtime.stop()
    return kept


class _WithoutGloo(ProcessGroupRuntime):
    """A group that can't communicate what is in host memory, as far as it knows."""

    _on_host = False


def told_over_each_channel() -> list[list[Any]]:
    """What a rank gets over the main group, over a side channel, and as over a group of NCCL's."""
    runtime, other = started(), _WithoutGloo()
    other.rank, other.world_size = runtime.rank, runtime.world_size
    side = runtime.side_channel()
    found = []
    for one in (runtime, side, other):
        told: list[Any] = []
        for turn in range(3):
            mine = {"rank": one.rank, "turn": turn, "much": b"x" * 1000 * one.rank}
            told += [one.gather_objects_to(mine, turn % 2), one.total([one.rank, -turn, 2**40]), one.total([])]
        found.append(told)
    side.stop()
    runtime.stop()
    return found


def test_one_rank_gets_what_all_bring_and_all_get_sums() -> None:
    with RankPool() as ranks:
        for rank, channels in enumerate(ranks.run(2, told_over_each_channel, timeout=100)):
            for told in channels:
                for turn in range(3):
                    gathered, sums, nothing = told[3 * turn : 3 * turn + 3]
                    all_of_them = [{"rank": r, "turn": turn, "much": b"x" * 1000 * r} for r in range(2)]
                    assert gathered == (all_of_them if rank == turn % 2 else None)
                    assert (sums, nothing) == ([1, -2 * turn, 2**41], [])
    alone = ProcessGroupRuntime()
    assert (alone.gather_objects_to("x"), alone.total([3, 4])) == (["x"], [3, 4])


def test_rank_that_came_alone_may_come_again() -> None:
    with RankPool() as ranks:
        told, _ = ranks.run(2, comes_again, timeout=100)
    assert "rank 0 waited 0.5 s in something for what rank 1 did not do" in told


def test_a_meeting_leaves_nothing_in_the_store() -> None:
    with RankPool() as ranks:
        few, many = (max(ranks.run(2, keys_after, meetings, timeout=100)) for meetings in (3, 30))
    assert many == few


def test_a_process_group_without_a_backend_for_the_device_is_refused() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runtime = ProcessGroupRuntime()
        where = {"rank": 0, "local_rank": 0, "world_size": 1, "address": "localhost", "port": 0}
        runtime.start(device=torch.device("cpu"), **where)
        with pytest.raises(ShardingError, match=r"has a process group already, 'cpu:gloo'.* on 'meta'") as refused:
            runtime.start(device=torch.device("meta"), **where)
        assert "destroy_process_group() before this run" in str(refused.value)
        assert "init_process_group('cpu:gloo,meta:...')" in str(refused.value)
        with pytest.raises(ShardingError, match="init_process_group\\('cpu:gloo,cuda:nccl'\\)"):
            _check_group("cuda")
    finally:
        dist.destroy_process_group()


def test_a_backend_that_cannot_communicate_what_is_on_the_device_is_refused() -> None:
    where = {"rank": 0, "local_rank": 0, "world_size": 1, "address": "localhost", "port": 0}
    with pytest.raises(ShardingError, match=r"'gloo' can't communicate tensors on 'meta'.* 'cpu'") as refused:
        ProcessGroupRuntime("gloo").start(device=torch.device("meta"), **where)
    assert "process_group_backend='cpu:gloo,meta:...'" in str(refused.value)


def test_a_strategy_whose_ranks_were_not_started_says_so() -> None:
    """Fabric takes itself for launched once ``launch(function)`` has run, also where the ranks were other processes."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=LoopbackFabricStrategy())
    fabric._launched = True
    with pytest.raises(ShardingError, match=r"loopback: its ranks were not started in this process.\n.*fabric.launch"):
        fabric.setup(nn.Linear(2, 2))


def shown_parameters() -> tuple[bool, list[str], list[str]]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=LoopbackFabricStrategy())
    fabric.launch()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    alone = fabric.strategy.setup_module(module)
    same = [id(one) for one in alone.parameters()] == [id(one) for one in module.parameters()]
    through_fabric = fabric.setup_module(nn.Linear(2, 2), move_to_device=False)
    return same, [name for name, _ in alone.named_parameters()], [name for name, _ in through_fabric.named_parameters()]


def test_what_a_strategy_sets_up_by_itself_shows_the_parameters_of_the_users_module() -> None:
    with RankPool() as ranks:
        ((same, alone, through_fabric),) = ranks.run(1, shown_parameters, timeout=100)
    assert same
    assert alone == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert through_fabric == ["_original_module.weight", "_original_module.bias"]  # each once, as before
