"""Losses and weights equal those of one unsharded process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import runs
from fsdp_core.testing import RankPool
from oracle import FP32_TOLERANCE, train_plain


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


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_groups"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fabric_equals_plain(ranks: RankPool, world_size: int, optimizer: str) -> None:
    got = ranks.run(world_size, runs.fabric_fit, world_size, 4, optimizer)
    assert_same(got, train_plain(4, getattr(oracle, optimizer)))


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_equals_plain(ranks: RankPool, tmp_path: Path, world_size: int, sync_each_batch: bool) -> None:
    want = train_plain(6, oracle.momentum, accumulate=3)
    options = {"sync_each_batch": sync_each_batch}
    assert_same(
        ranks.run(world_size, partial_fit, str(tmp_path), world_size, 6, options, {"accumulate_grad_batches": 3}), want
    )
    assert_same(ranks.run(world_size, runs.fabric_fit, world_size, 6, "momentum", options, 3), want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_by_norm_equals_plain(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    want = train_plain(4, oracle.momentum, clip_norm=0.2)
    assert_same(ranks.run(world_size, partial_fit, str(tmp_path), world_size, 4, {}, {"gradient_clip_val": 0.2}), want)
    assert_same(ranks.run(world_size, runs.fabric_fit, world_size, 4, "momentum", {}, 1, 0.2), want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_by_value_equals_plain(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    want = train_plain(4, oracle.momentum, clip_value=0.01)
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    assert_same(ranks.run(world_size, partial_fit, str(tmp_path), world_size, 4, {}, clip), want)
    assert_same(ranks.run(world_size, runs.fabric_fit, world_size, 4, "momentum", {}, 1, None, 0.01), want)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": {oracle.Block}},
        {"auto_wrap_policy": {torch.nn.Linear, torch.nn.LayerNorm}},
        {"auto_wrap_policy": oracle.is_block},
        {"auto_wrap_policy": oracle.torch_policy},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"cpu_offload": True},
        {"activation_checkpointing_policy": {oracle.Block}},
        {"activation_checkpointing_policy": oracle.is_block, "auto_wrap_policy": {torch.nn.LayerNorm}},
    ],
    ids=lambda options: ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_options_leave_numbers_alone(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    got = ranks.run(2, partial_fit, str(tmp_path), 2, 3, options, {})
    assert_same(got, train_plain(3, oracle.momentum))


def partial_fit(tmp: str, world_size: int, steps: int, options: dict[str, Any], trainer: dict[str, Any]) -> Any:
    return runs.fit(tmp, world_size, steps, "momentum", options, **trainer)
