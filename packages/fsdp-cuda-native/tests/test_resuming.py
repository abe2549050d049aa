"""Exact resume, however FSDP1 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import test_conformance
from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.checkpoints.resuming import assert_goes_on_between_micro_batches
from fsdp_core.testing.suite.numerics.pairs import assert_equals_plain


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_accumulated_gradients(ranks: RankPool, tmp_path: Path, sharding: str, sync_each_batch: bool) -> None:
    options: dict[str, Any] = {"sharding_strategy": sharding, "sync_each_batch": sync_each_batch}
    assert_goes_on_between_micro_batches(ranks, tmp_path, "fsdp_native", {"options": options})


def test_gradients_of_whole_parameters_are_resumed_in_full_precision(ranks: RankPool, tmp_path: Path) -> None:
    """Under ``NO_SHARD`` they are reduced, and in fp32; they were restored in bf16."""
    options = {"sharding_strategy": "NO_SHARD", "precision": "bf16-mixed", "accumulate": "3", "resume": "amid a step"}
    assert_equals_plain(ranks, tmp_path, test_conformance.TestNative, front_end="by hand", **options)
