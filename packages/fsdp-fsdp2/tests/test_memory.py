"""How much memory a rank takes to build a model whose layers are marked: its shard, and one layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.measuring import memory


@pytest.mark.everything
@pytest.mark.skipif(not memory.is_measurable(), reason="only Linux resets a process's peak")
def test_building_a_model_takes_a_shard_and_a_layer(tmp_path: Path) -> None:
    with RankPool() as ranks:
        memory.assert_built_in_a_shard_and_a_layer(ranks, str(tmp_path), "fsdp2")
