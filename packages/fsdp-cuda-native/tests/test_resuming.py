"""Exact resume, however FSDP1 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.checkpoints.resuming import assert_goes_on_between_micro_batches


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_accumulated_gradients(ranks: RankPool, tmp_path: Path, sharding: str, sync_each_batch: bool) -> None:
    options: dict[str, Any] = {"sharding_strategy": sharding, "sync_each_batch": sync_each_batch}
    assert_goes_on_between_micro_batches(ranks, tmp_path, "fsdp_native", {"options": options})
