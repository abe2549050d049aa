"""Losses and weights equal those of one unsharded process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import runs
import torch
from oracle import FP32_TOLERANCE, train_plain
from torch import Tensor

from fsdp_core.testing import RankPool


def assert_same(got: list[Any], want: tuple[list[float], dict[str, Tensor]]) -> None:
    want_losses, want_state = want
    for losses, state in got:
        assert losses == pytest.approx(want_losses, abs=FP32_TOLERANCE)
        assert state.keys() == want_state.keys()
        for name, tensor in want_state.items():
            torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw_groups"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trainer_equals_plain(ranks: RankPool, tmp_path: Path, world_size: int, optimizer: str) -> None:
    got = ranks.run(world_size, runs.fit, str(tmp_path), world_size, 4, optimizer)
    assert_same(got, train_plain(4, getattr(oracle, optimizer)))
