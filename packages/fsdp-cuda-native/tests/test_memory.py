"""How much memory a rank takes to build a model whose layers are marked: its shard, and one layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring import memory

pytestmark = [
    pytest.mark.everything,
    pytest.mark.skipif(not memory.is_measurable(), reason="only Linux resets a process's peak"),
]

BLOCKS = 16  # 128 MiB


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def test_building_a_model_takes_a_shard_and_a_layer(ranks: RankPool, tmp_path: Path) -> None:
    with oracle.seeded(1):
        unsharded = memory.first_rows(memory.Deep(BLOCKS).state_dict())
    for world_size, built in (
        (2, ranks.run(2, memory.built_under_fabric, "fsdp_native", 2, BLOCKS, timeout=200)),
        (4, ranks.run(4, memory.configured_under_trainer, "fsdp_native", str(tmp_path), 4, BLOCKS, timeout=200)),
    ):
        for peak, rows in built:
            assert peak <= 1.25 * (BLOCKS / world_size + 1) * memory.BLOCK_BYTES, f"{peak / 2**20:.0f} MiB"
            for name, tensor in unsharded.items():
                assert torch.equal(rows[name], tensor), name
