"""Optimizers over shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.training.optimizers import assert_all_trained, built_after_evaluation
from fsdp_core.testing.training import new_fabric


def test_groups_by_ndim_can_be_made_of_shards(ranks: RankPool) -> None:
    """DTensors show the shapes that the user wrote, outside of ``configure_optimizers`` too."""
    for got in ranks.run(2, built_after_evaluation, "fsdp2", "adamw_groups"):
        assert_all_trained(got)


class DivisibleNet(nn.Module):
    """Without parameters that are kept whole, or that two ranks don't divide: LBFGS takes no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Linear(2, FEATURES)
        )
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def divisible_net() -> nn.Module:
    with oracle.seeded(4):
        return DivisibleNet()


def lbfgs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=3)


def lbfgs_steps(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any], steps: int) -> list[float]:
    """What its closure computes, over the same whole batch on every rank."""
    losses = []
    x, y = oracle.global_batches(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return losses


def with_lbfgs(path: str) -> list[float]:
    """Four steps, of which two follow a resume."""
    losses: list[float] = []
    for number in range(2):
        fabric = new_fabric("fsdp2")
        net = divisible_net()
        model, optimizer = fabric.setup(net, lbfgs(net))
        if number:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        losses += lbfgs_steps(model, optimizer, fabric.backward, 2)
        if not number:
            fabric.save(path, {"model": model, "optimizer": optimizer})
    return losses


def test_lbfgs_and_its_resume(ranks: RankPool, tmp_path: Path) -> None:
    net = divisible_net()
    want = lbfgs_steps(net, lbfgs(net), lambda loss: loss.backward(), 4)
    for got in ranks.run(2, with_lbfgs, str(tmp_path / "checkpoint")):
        assert got == pytest.approx(want, abs=FP32_TOLERANCE)


#: Optimizers whose step torch can't take over DTensors, and what is said of them.
FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "SGD": ({"lr": 0.1, "fused": True}, "Leave fused=True out"),
    "Adagrad": ({"fused": True}, "Leave fused=True out"),
    "Rprop": ({}, "over which its steps are right, such as strategy='fsdp_native'"),
    "LBFGS": ({}, "a step of LBFGS fails over DTensors"),  # of parameters that the ranks don't divide, or keep whole
}
if hasattr(FSDPModule, "set_keep_unsharded_storage"):  # from torch 2.15 on
    del FAILING["Rprop"]  # it is right, as test_every_optimizer_of_torch_is_right_or_refused shows


def refused_optimizers() -> dict[str, str]:
    fabric = new_fabric("fsdp2")
    told = {}
    for name, (settings, _) in FAILING.items():
        net = oracle.new_net()
        make = getattr(torch.optim, name)
        told[name] = refusal(OptimizerMismatchError, partial(fabric.setup, net, make(net.parameters(), **settings)))
    return told


def test_optimizers_that_fail_over_dtensors_are_refused_before_they_step(ranks: RankPool) -> None:
    for told in ranks.run(2, refused_optimizers):
        for name, (_, words) in FAILING.items():
            assert_says(told[name], name, words)
        assert "fsdp_native" not in told["LBFGS"], "which refuses it too"


def step_in_lists(precision: Any, optimizer_class: Any) -> dict[str, bool]:
    """Which parameters move when an optimizer computes with lists of shards and of a batch norm that stays whole."""
    fabric = new_fabric("fsdp2", 2, precision=precision)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    # what foreach=None, the default, means on a GPU
    model, optimizer = fabric.setup(net, optimizer_class(net.parameters(), lr=0.1, foreach=True))
    before = {name: local_tensor(parameter.detach()).clone() for name, parameter in net.named_parameters()}
    for _ in range(2):
        x = fabric.to_device(torch.arange(32.0).reshape(8, 4))
        fabric.backward(mse_loss(model(x), torch.ones_like(x)))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: not torch.equal(before[name], local_tensor(p.detach())) for name, p in net.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_over_lists_of_shards_and_whole_parameters(ranks: RankPool, precision: str, optimizer_class: Any) -> None:
    for has_moved in ranks.run(2, step_in_lists, precision, optimizer_class):
        assert has_moved["0.weight"], "shards are not trained"
        assert has_moved["1.weight"], "the batch norm, which every rank holds whole, is not trained"
