"""Optimizers that look at whole matrices, as Muon does: equal to one process, their state saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import BATCH, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import means, new_fabric

__all__ = ["OwnMuon", "Steps", "WholeMatricesSuite", "make_muon", "plain_steps", "steps_on"]

#: Losses, weights, the optimizer's state by parameter name, and the number of matrices that this rank orthogonalised.
Steps = tuple[list[float], dict[str, Tensor], dict[str, dict[str, Any]], int]


class OwnMuon(torch.optim.Optimizer):
    """A user's Muon, in fp32: matrices get their orthogonalised momentum, all else AdamW's update."""

    matrices: ClassVar[int] = 0

    def __init__(self, groups: Any, lr: float = 0.02, momentum: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "use_muon": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(self._update(group, parameter, self.state[parameter]), alpha=-group["lr"])
        return loss

    def _update(self, group: Mapping[str, Any], parameter: Tensor, state: dict[str, Any]) -> Tensor:
        grad = parameter.grad
        assert grad is not None
        average: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        average.lerp_(grad, 1 - group["momentum"])
        if group["use_muon"]:
            return self._orthogonal(average)
        state["step"] = state.get("step", 0) + 1
        square = state.setdefault("square", torch.zeros_like(parameter))
        square.lerp_(grad.square(), 0.05)
        scaled: Tensor = average / (square.sqrt() + 1e-3)
        return scaled

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Three iterations of Newton-Schulz (https://kellerjordan.github.io/posts/muon): enough to see differences."""
        type(self).matrices += 1
        x: Tensor = matrix / (matrix.norm() + 1e-7)
        for _ in range(3):
            inner = x @ x.mT
            x = 1.5 * x - 0.5 * inner @ x
        return x


def make_muon(net: nn.Module) -> OwnMuon:
    """The optimizer, with matrices in two groups of different learning rates, and a third group of all else."""
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    up = [p for name, p in trained if p.ndim == 2 and "up" in name]
    matrices = [p for name, p in trained if p.ndim == 2 and "up" not in name]
    rest = [p for _, p in trained if p.ndim < 2]
    return OwnMuon(
        [{"params": up, "lr": 0.05}, {"params": matrices}, {"params": rest, "use_muon": False, "weight_decay": 0.0}]
    )


def plain_steps(steps: int, *, width: int = 7) -> Steps:
    """Train unsharded in this process."""
    net = oracle.new_net(width=width)
    optimizer = make_muon(net)
    schedule = StepLR(optimizer, 2, 0.5)
    losses = []
    for x, y in oracle.global_batches(steps):
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    names: dict[Any, str] = {p: name for name, p in net.named_parameters()}
    state = {names[p]: dict(values) for p, values in optimizer.state.items()}
    return losses, {name: tensor.clone() for name, tensor in net.state_dict().items()}, state, 0


def steps_on(
    strategy: str,
    world_size: int,
    first: int,
    last: int,
    options: Mapping[str, Any] | None = None,
    width: int = 7,
    load: str | None = None,
    save: str | None = None,
) -> Steps | str:
    """Train on a rank under Fabric, from a checkpoint and to one.

    Args:
        strategy: The strategy's name.
        world_size: The number of ranks.
        first: The first step, from 0.
        last: The step before which to stop.
        options: The strategy's options.
        width: The blocks' inner width.
        load: The checkpoint to begin with.
        save: Where to save one at the end.

    Returns:
        The trained steps, or the message of the refusal.
    """
    OwnMuon.matrices = 0
    fabric = new_fabric(strategy, world_size, options)
    used_strategy: Any = fabric.strategy
    net = oracle.new_net(width=width)
    try:
        model, optimizer = fabric.setup(net, make_muon(net))
    except OptimizerMismatchError as error:
        return str(error)
    OwnMuon.matrices = 0  # does not count the trial run of the set-up
    torch_optimizer: Any = optimizer.optimizer
    schedule = StepLR(torch_optimizer, 2, 0.5)
    losses = []
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if load is not None:
        fabric.load(load, state)
    runtime = used_strategy.runtime
    shares = runtime.data_parallel_world_size
    row_block = runtime.data_parallel_rank
    size = BATCH // shares
    for x, y in oracle.global_batches(last)[first:]:
        x, y = (fabric.to_device(rows[row_block * size : (row_block + 1) * size]) for rows in (x, y))

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            return loss

        optimizer.step(evaluate)
        schedule.step()
    if save is not None:
        fabric.save(save, state)
    return means(losses), full_state(used_strategy), full_optimizer_state(used_strategy, optimizer), OwnMuon.matrices


def assert_same_steps(trained: Any, want: Steps, first: int = 0, tolerance: float = FP32_TOLERANCE) -> None:
    """Assert that losses, weights and the optimizer's state are those of one process."""
    assert not isinstance(trained, str), trained
    assert trained[0] == pytest.approx(want[0][first:], abs=tolerance)
    torch.testing.assert_close(trained[1], want[1], atol=tolerance, rtol=tolerance)
    assert trained[2].keys() == want[2].keys()
    for name, values in want[2].items():
        assert trained[2][name].keys() == values.keys(), name
        for key, value in values.items():
            torch.testing.assert_close(
                trained[2][name][key], value, atol=tolerance, rtol=tolerance, msg=f"{name} {key}"
            )


class WholeMatricesSuite(Clauses):
    """An optimizer that looks at whole matrices is right, or refused."""

    @on_ranks("processes")  # XLA would compile a program for each matrix
    def test_optimizer_of_whole_matrices_and_its_resume(self, ranks: Ranks, tmp_path: Path) -> None:
        """A user's Muon must train as in one process, also when resumed on another number of ranks, or be refused."""
        folder = str(tmp_path / "checkpoint")
        outcomes = ranks.run(2, steps_on, self.strategy, 2, 0, 2, None, 7, None, folder)
        if any(isinstance(outcome, str) for outcome in outcomes):
            for outcome in outcomes:
                assert_says(outcome, "OwnMuon", "Use")
            return
        for outcome in outcomes:
            assert_same_steps(outcome, plain_steps(2))
        for outcome in ranks.run(3, steps_on, self.strategy, 3, 2, 4, None, 7, folder):
            assert_same_steps(outcome, plain_steps(4), first=2)
