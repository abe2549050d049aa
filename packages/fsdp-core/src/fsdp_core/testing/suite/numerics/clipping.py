"""Clipping by norm and by value; gradient norms of any order, and over the parameters of one of several optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state, trained_by
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, fabric_fit, fit, loader, new_fabric, new_trainer, own_share

__all__ = ["ClippingSuite"]

#: Small enough to clip norms of any order.
MAX_NORM = 0.1


def _halves(net: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two optimizers: one over the blocks, and one over the tied input and output layer, with the larger gradient."""
    around = [net.inp.weight]  # tied with the output's
    return oracle.momentum(net.blocks), torch.optim.SGD(around, lr=0.05, momentum=0.9)


def _train_clipped(strategy: str | None, order: float) -> tuple[list[float], dict[str, Tensor]]:
    """The norms that clipping returns, and the state after a step of each optimizer."""
    fabric: Any = None if strategy is None else new_fabric(strategy)
    net: Any = oracle.new_net()
    optimizers: Any = _halves(net)
    batch = oracle.global_batches(1)[0]
    if fabric is None:
        mse_loss(net(batch[0]), batch[1]).backward()
        norms = [nn.utils.clip_grad_norm_(trained_by(optimizer), MAX_NORM, order) for optimizer in optimizers]
    else:
        model, *optimizers = fabric.setup(net, *optimizers)
        x, y = own_share(fabric, batch)
        fabric.backward(mse_loss(model(x), y))
        modules = (model, net.out)  # a submodule identifies the model as well
        norms = [
            fabric.clip_gradients(module, optimizer, max_norm=MAX_NORM, norm_type=order)
            for module, optimizer in zip(modules, optimizers, strict=True)
        ]
    for optimizer in optimizers:
        optimizer.step()
    return [float(norm) for norm in norms], net.state_dict() if fabric is None else full_state(fabric.strategy)


class LitNorms(Lit):
    """Calls Lightning's ``grad_norm`` in the hook that Lightning's documentation names."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms: list[Any] = [grad_norm(self, 2), grad_norm(self, "inf"), grad_norm(self.net.blocks, 3)]


def _norms_of_parameters(strategy: str, tmp: str) -> list[dict[str, float]]:
    module = LitNorms()
    new_trainer(tmp, strategy, 2).fit(module, loader(1, 2))
    return [{name: float(value) for name, value in norms.items()} for norms in module.norms]


class LitNormsByHand(LitNorms):
    """Computes norms inside its training step, over the parameters of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(mse_loss(self(batch[0]), batch[1]))
        self.message = refusal(ShardingError, lambda: grad_norm(self, 2))
        self.norm = float(self.trainer.strategy.sharded.clip_norm(trained_by(optimizer), float("inf")))  # type: ignore[attr-defined]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def _norms_by_hand(strategy: str, tmp: str) -> tuple[str, float]:
    module = LitNormsByHand()
    new_trainer(tmp, strategy, 2).fit(module, loader(1, 2))
    return module.message, module.norm


def _plain_norms(order: float, prefix: str, inside: str = "") -> dict[str, float]:
    net = oracle.new_net()
    x, y = oracle.global_batches(1)[0]
    mse_loss(net(x), y).backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None and n.startswith(inside)}
    norms = {f"grad_{order}_norm/{prefix}{n.removeprefix(inside)}": g.norm(order).item() for n, g in grads.items()}
    total = torch.cat([g.flatten() for g in grads.values()]).norm(order).item()
    return {**norms, f"grad_{order}_norm_total": total}


class ClippingSuite(Clauses):
    """Gradients are clipped as in one process, norms are those of whole gradients, and each optimizer has its own."""

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_clipping_by_norm_equals_plain(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """With clipping by norm, losses and weights must equal those of one unsharded process."""
        run = partial(ranks.run, world_size)
        tmp = str(tmp_path)
        trainer = {"gradient_clip_val": 0.2}
        got = run(fit, self.strategy, tmp, world_size, 4, "momentum", {}, trainer)
        got += run(fabric_fit, self.strategy, world_size, 4, "momentum", {}, 1, 0.2)
        assert_same(got, train_plain(4, oracle.momentum, clip_norm=0.2))

    @requires(Capability.CLIP_BY_VALUE)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_clipping_by_value_equals_plain(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """With clipping by value, losses and weights must equal those of one unsharded process."""
        run = partial(ranks.run, world_size)
        tmp = str(tmp_path)
        trainer = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        got = run(fit, self.strategy, tmp, world_size, 4, "momentum", {}, trainer)
        got += run(fabric_fit, self.strategy, world_size, 4, "momentum", {}, 1, None, 0.01)
        assert_same(got, train_plain(4, oracle.momentum, clip_value=0.01))

    def test_norms_of_parameters(self, ranks: Ranks, tmp_path: Path) -> None:
        """Lightning's ``grad_norm`` must return the norms of whole gradients, by the user's parameter names."""
        want = [_plain_norms(2.0, "net."), _plain_norms(float("inf"), "net."), _plain_norms(3.0, "", "blocks.")]
        for got in ranks.run(2, _norms_of_parameters, self.strategy, str(tmp_path)):
            for norms, wanted in zip(got, want, strict=True):
                assert norms == pytest.approx(wanted, rel=FP32_TOLERANCE, abs=FP32_TOLERANCE)

    @requires(Capability.MANUAL_OPTIMIZATION, Capability.CLIP_BY_NORM)
    def test_norms_of_parameters_inside_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """``grad_norm`` inside a training step must be refused, and the call that the error suggests must work."""
        want = _plain_norms(2.0, "")["grad_2.0_norm_total"]
        for message, norm in ranks.run(2, _norms_by_hand, self.strategy, str(tmp_path)):
            assert_says(message, "grad_norm(", "inside a step", "on_before_optimizer_step()", "sharded.clip_norm(")
            assert norm == pytest.approx(want, rel=FP32_TOLERANCE)

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
    def test_each_optimizer_is_clipped_by_itself(self, ranks: Ranks, order: float) -> None:
        """Clipping must return and use the norm of the given optimizer's gradients alone."""
        want_norms, want = _train_clipped(None, order)
        got = ranks.run(2, _train_clipped, self.strategy, order)
        for norms, _ in got:
            assert norms == pytest.approx(want_norms, rel=FP32_TOLERANCE)
        assert_same([([], state) for _, state in got], ([], want))
