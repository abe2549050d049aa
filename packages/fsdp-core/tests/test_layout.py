"""Runs of consecutive elements as boxes, and optimizer state over flat parameters."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunked_tensors import slices_of
from fsdp_core.errors import CheckpointMismatchError, OptimizerMismatchError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.optimizers.rebinding import rebind_optimizer
from fsdp_core.state.full_tensor import gather_full
from fsdp_core.state.layout import FlatRange, Part, boxes
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]
ALONE = ProcessGroupRuntime()


def every_run(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    size = prod(shape)
    return [(start, length) for start in range(size) for length in range(size - start + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_hold_the_run_in_order(shape: tuple[int, ...]) -> None:
    numbered = torch.arange(prod(shape)).reshape(shape)
    for start, length in every_run(shape):
        found = list(boxes(shape, start, length))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        at = 0
        for offsets, lengths, position in found:
            assert position == at
            place = slices_of(offsets, lengths)
            assert numbered[place].reshape(-1).tolist() == list(range(start + at, start + at + prod(lengths)))
            at += prod(lengths)
        assert at == length


def flat_part(name: str, shape: tuple[int, ...], offset: int = 0, start: int = 0, length: int | None = None) -> Part:
    run = FlatRange(offset=offset, start=start, length=prod(shape) if length is None else length)
    return Part(name=name, shape=shape, range=run)


class Flat:
    """A weight and a bias in one flat parameter, with padding between and behind."""

    def __init__(self) -> None:
        self.held = nn.Parameter(torch.zeros(12))
        self.layout = {self.held: (flat_part("weight", (2, 3)), flat_part("bias", (3,), offset=8))}
        self.optimizer = torch.optim.AdamW([self.held], lr=0.1)

    def step(self) -> None:
        self.held.grad = torch.arange(12.0)
        self.optimizer.step()


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": {n: {k: gather_full(v, ALONE) for k, v in values.items()} for n, values in state["state"].items()},
        "param_groups": state["param_groups"],
    }


def test_state_of_a_flat_parameter_goes_by_the_names_of_its_parts() -> None:
    flat = Flat()
    flat.step()
    state = as_plain(optimizer_state(flat.optimizer, flat.layout, ALONE))
    moment = flat.optimizer.state[flat.held]["exp_avg"]
    assert state["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.equal(state["state"]["weight"]["exp_avg"], moment[:6].view(2, 3))
    assert torch.equal(state["state"]["bias"]["exp_avg"], moment[8:11])
    assert [state["state"][name]["step"].item() for name in ("weight", "bias")] == [1, 1]

    other = Flat()
    load_optimizer_state(other.optimizer, other.layout, state)
    restored = other.optimizer.state[other.held]
    kept = [*range(6), 8, 9, 10]
    assert torch.equal(restored["exp_avg"][kept], moment[kept])
    assert (restored["step"].item(), restored["exp_avg"].shape) == (1, other.held.shape)


def test_parts_of_different_step_counts_fit_no_flat_parameter() -> None:
    flat = Flat()
    flat.step()
    state = as_plain(optimizer_state(flat.optimizer, flat.layout, ALONE))
    state["state"]["bias"]["step"] = torch.tensor(2.0)
    with pytest.raises(CheckpointMismatchError, match="'weight' and 'bias' are one flat parameter") as told:
        load_optimizer_state(flat.optimizer, flat.layout, state)
    assert "To load it, use a strategy that keeps parameters separate." in str(told.value)


def test_a_rank_that_holds_nothing_of_a_parameter_gets_no_state() -> None:
    """An optimizer would count no steps there, and save the stale count."""
    held = nn.Parameter(torch.zeros(0))
    optimizer = torch.optim.AdamW([held])
    layout = {held: (flat_part("w", (2, 2), length=0),)}
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    values = {"step": torch.tensor(5.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    load_optimizer_state(optimizer, layout, {"state": {"w": values}, "param_groups": [{**group, "params": ["w"]}]})
    assert not optimizer.state


@pytest.mark.parametrize(
    ("groups", "refused"),
    [([["weight", "bias"]], False), ([["weight"], ["bias"]], True), ([["weight"]], True), ([["bias"]], True)],
    ids=str,
)
def test_rebinding_to_a_flat_parameter(groups: list[list[str]], refused: bool) -> None:
    flat = Flat()
    written: dict[str, Tensor] = {name: nn.Parameter(torch.zeros(2)) for name in ("weight", "bias")}
    optimizer = torch.optim.SGD([{"params": [written[name] for name in group]} for group in groups], lr=0.1)

    def sharded(parameter: nn.Parameter) -> nn.Parameter | None:
        return flat.held if any(parameter is one for one in written.values()) else None

    if refused:
        with pytest.raises(OptimizerMismatchError, match="are one flat parameter here") as told:
            rebind_optimizer(optimizer, sharded, flat.layout)
        assert "in one group; or use a strategy that keeps parameters separate." in str(told.value)
    else:
        rebind_optimizer(optimizer, sharded, flat.layout)
        assert [p is flat.held for group in optimizer.param_groups for p in group["params"]] == [True]
