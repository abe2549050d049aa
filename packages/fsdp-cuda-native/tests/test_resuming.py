"""Exact resume, however FSDP1 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fsdp_core
import test_conformance
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, train_plain
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.checkpoints.resuming import assert_goes_on_between_micro_batches
from fsdp_core.testing.suite.numerics.forward_backward_order import SkippingNet
from fsdp_core.testing.suite.numerics.pairs import assert_equals_plain
from native_runs import FLAT, WHOLE, set_up


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_accumulated_gradients(ranks: RankPool, tmp_path: Path, sharding: str, sync_each_batch: bool) -> None:
    options: dict[str, Any] = {"sharding_strategy": sharding, "sync_each_batch": sync_each_batch}
    assert_goes_on_between_micro_batches(ranks, tmp_path, "fsdp_native", {"options": options})


#: The options of the run that saves, and of the one that goes on.
HANDED_ON = [({}, {}), (FLAT, FLAT), ({}, WHOLE), (FLAT, {**FLAT, **WHOLE})]


def with_gradients(options: dict[str, Any], net: nn.Module | None = None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """A Fabric, a model and its optimizer, and all that a checkpoint amid an accumulation holds."""
    fabric, _, model, optimizer = set_up(options, net=net, optimizer=oracle.momentum)
    state = {"model": model, "optimizer": optimizer, "gradients": fsdp_core.AccumulatedGradients(model)}
    return fabric, model, optimizer, state


def third_micro_batch(path: str, options: dict[str, Any], resumed: bool) -> dict[str, Any]:
    """The weights after a step of three micro-batches, the first of them reduced, saved before the third."""
    fabric, model, optimizer, state = with_gradients(options)
    for number, (x, y) in enumerate(oracle.global_batches(3)):
        if number == 2 and not resumed:
            fabric.save(path, state)
        if number == 2 and resumed:
            fabric.load(path, state)
        if number == 2 or not resumed:
            with fabric.no_backward_sync(model, enabled=number == 1):
                fabric.backward(mse_loss(model(x[fabric.global_rank :: 2]), y[fabric.global_rank :: 2]) / 3)
    optimizer.step()
    return full_state(fabric.strategy)


def handed_on(tmp: str) -> list[list[dict[str, Any]]]:
    return [
        [third_micro_batch(f"{tmp}/{i}", saving, False), third_micro_batch(f"{tmp}/{i}", going_on, True)]
        for i, (saving, going_on) in enumerate(HANDED_ON)
    ]


def test_gradients_of_which_some_are_reduced(ranks: RankPool, tmp_path: Path) -> None:
    """A unit then has two: its shard's, and one that it has not reduced yet."""
    _, want = train_plain(3, oracle.momentum, accumulate=3)
    for runs in ranks.run(2, handed_on, str(tmp_path)):
        for number, got in enumerate(runs):
            for how, state in zip(("going on", "resumed"), got, strict=True):
                message = f"{how} with {HANDED_ON[number]}"
                torch.testing.assert_close(
                    state, want, rtol=0, atol=FP32_TOLERANCE, msg=lambda t, m=message: f"{m}: {t}"
                )


def leaving_out(first: int) -> SkippingNet:
    net = SkippingNet(first, period=2)
    net.load_state_dict(oracle.new_net().state_dict())
    return net


def left_out_last(path: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The weights after a step whose last micro-batch leaves out a block; of the run that saves, and of the resumed."""
    states = []
    for resumed in (False, True):
        fabric, model, optimizer, state = with_gradients(options, leaving_out(1 - resumed))
        (x, y), (x2, y2) = (
            (x[fabric.global_rank :: 2], y[fabric.global_rank :: 2]) for x, y in oracle.global_batches(2)
        )
        if resumed:
            fabric.load(path, state)
        else:
            with fabric.no_backward_sync(model):
                fabric.backward(mse_loss(model(x), y) / 2)
            fabric.save(path, state)
        fabric.backward(mse_loss(model(x2), y2) / 2)
        optimizer.step()
        states.append(full_state(fabric.strategy))
    return states


@pytest.mark.parametrize("options", [{}, FLAT, WHOLE], ids=["sharded", "flat", "whole"])
def test_gradients_of_a_unit_that_the_last_micro_batch_leaves_out(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """They were lost, or failed an assertion of FSDP1's, since only a unit that is visited reduces."""
    _, want = train_plain(2, oracle.momentum, accumulate=2, net=leaving_out(1))
    for states in ranks.run(2, left_out_last, str(tmp_path / "c"), options):
        for state in states:
            torch.testing.assert_close(state, want, rtol=0, atol=FP32_TOLERANCE)


def test_gradients_of_whole_parameters_are_resumed_in_full_precision(ranks: RankPool, tmp_path: Path) -> None:
    """Under ``NO_SHARD`` they are reduced, and in fp32; they were restored in bf16."""
    options = {"sharding_strategy": "NO_SHARD", "precision": "bf16-mixed", "accumulate": "3", "resume": "amid a step"}
    assert_equals_plain(ranks, tmp_path, test_conformance.TestNative, front_end="by hand", **options)
