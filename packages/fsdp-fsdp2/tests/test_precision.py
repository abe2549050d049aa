"""Policies of FSDP2's own beside precision strings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.precision import ShardPrecision
from fsdp_core.testing import RankPool
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.precision import seen_by_a_block


def test_explicit_policy_wins(ranks: RankPool, tmp_path: Path) -> None:
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
    for got in ranks.run(2, seen_by_a_block, "fsdp2", str(tmp_path), "bf16-mixed", policy):
        assert (got["shards"], got["weight"], got["input"]) == ({torch.float32}, torch.float16, torch.float16)


@pytest.mark.parametrize(("precision", "instead"), [("bf16-mixed", "16-mixed"), ("bf16-true", "16-true")])
def test_device_without_bf16(precision: str, instead: str) -> None:
    dtypes, device = ShardPrecision.named(precision), torch.device("cuda", 0)
    told = refusal(UnsupportedCapabilityError, lambda: dtypes.check_device(device, bf16_supported=False))
    assert_says(told, f"precision={precision!r}", "cuda:0", f"precision={instead!r}", "precision='32-true'")
