"""Precision strings and policies as dtypes of shards, computation and reduction."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.precision import PrecisionSuite, seen_by_a_block


class TestPrecision(PrecisionSuite):
    strategy = "fsdp2"

    def test_explicit_policy_wins(self, ranks: RankPool, tmp_path: Path) -> None:
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
        for got in ranks.run(2, seen_by_a_block, "fsdp2", str(tmp_path), "bf16-mixed", policy):
            assert (got["shards"], got["weight"], got["input"]) == ({torch.float32}, torch.float16, torch.float16)
