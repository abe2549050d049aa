"""How much memory a rank takes to build a model without memory on each mesh: its shard, and little more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring import memory
from fsdp_core.testing.state import full_state, local
from fsdp_core.testing.training import new_fabric

pytestmark = [
    pytest.mark.everything,
    pytest.mark.skipif(not memory.is_measurable(), reason="only Linux resets a process's peak"),
]

#: The bar for the peak memory of building, in shards, each of which is as large as 16 blocks.
BAR = 1.2
BLOCKS_OF_A_SHARD = 16

MESHES: dict[str, tuple[dict[str, Any], int, int]] = {  # sizes, ranks, and in how many parts the model is
    "shard 4": ({}, 4, 4),
    "tensor 2": ({"tensor_parallel_size": 2}, 2, 2),
    "shard 2 x tensor 2": ({"tensor_parallel_size": 2}, 4, 4),
    "replicate 2 x shard 2": ({"data_parallel_replicate_size": 2}, 4, 2),
}


def as_it_is(block: Any) -> Any:
    return block


def by_hand(net: Any, mesh: Any) -> Any:
    """As a user shards it."""
    for block in net.blocks:
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = mesh["data_parallel"]
        if mesh["data_parallel_replicate"].size() > 1:
            data = mesh["data_parallel_replicate", "data_parallel"]
        fully_shard(block, mesh=data)
    return net


def built_on(mesh: str, function: Any) -> tuple[int, int, dict[str, torch.Tensor]]:
    sizes, ranks, parts = MESHES[mesh]
    blocks = BLOCKS_OF_A_SHARD * parts
    options = dict(sizes)
    if function is not None:
        options["parallelize_fn"] = function
    elif "tensor_parallel_size" in options:
        options["tp_plan"] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    fabric = new_fabric("fsdp2", ranks, options)

    def build(blocks: int, width: int = memory.WIDTH) -> Any:
        with oracle.seeded(1), fabric.init_module(empty_init=True):
            net = memory.Deep(blocks, width, mark=as_it_is)
        torch.manual_seed(1)
        fabric.setup(net)
        return net

    build(blocks, 8)  # what is no weight needs memory too, which is taken again
    built: list[Any] = []
    peak = memory.peak_of(lambda: built.append(build(blocks)))
    held = sum(local(p).nbytes for p in built[0].parameters())
    ours: Any = fabric.strategy
    return peak, held, memory.first_rows(full_state(ours, ours.roots[-1]))


@pytest.mark.parametrize("function", [None, by_hand], ids=["options", "by hand"])
@pytest.mark.parametrize("mesh", MESHES)
def test_building_takes_a_shard(ranks: RankPool, mesh: str, function: Any) -> None:
    _, world_size, parts = MESHES[mesh]
    with oracle.seeded(1):
        unsharded = memory.first_rows(memory.Deep(BLOCKS_OF_A_SHARD * parts, mark=as_it_is).state_dict())
    for peak, held, rows in ranks.run(world_size, built_on, mesh, function, timeout=280):
        shard = BLOCKS_OF_A_SHARD * memory.BLOCK_BYTES
        assert held <= 1.01 * shard
        assert peak <= BAR * shard, f"{peak / shard:.3f} shards"
        print(f"{mesh}: {peak / shard:.3f} shards")
        for name, tensor in unsharded.items():
            assert torch.equal(rows[name], tensor), name
