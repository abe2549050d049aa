"""Training after an exception."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import sharded_by
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.modules.parameters import Gains, gains_of
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, own_share

__all__ = ["ExceptionsSuite"]


class Failing(Lit):
    """Fails in its second step."""

    fail = True

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.fail and batch_idx == 1:
            self.losses.clear()
            raise ZeroDivisionError
        return loss


class Raises(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError


def _fit_after_forward(strategy: str, tmp: str) -> list[float]:
    module = Failing("sgd")
    with pytest.raises(ZeroDivisionError):
        new_trainer(tmp, strategy, 2).fit(module, loader(2, 2))
    module.fail = False
    new_trainer(tmp, strategy, 2).fit(module, loader(2, 2))
    return means(module.losses)


def _refused_after_forward(strategy: str, tmp: str) -> tuple[str, list[float]]:
    """The error for the interrupted module, and the losses of another one."""
    failing, other = Failing("sgd"), Lit("sgd")
    with pytest.raises(ZeroDivisionError):
        new_trainer(tmp, strategy, 2).fit(failing, loader(2, 2))
    told = refusal(ShardingError, lambda: new_trainer(tmp, strategy, 2).fit(failing, loader(2, 2)))
    assert not failing.losses
    new_trainer(tmp, strategy, 2).fit(other, loader(2, 2))
    return told, means(other.losses)


def _steps_after_backward(strategy: str, refused: bool) -> tuple[str, dict[str, float]]:
    """The error for the interrupted module if it is refused, or else its 0-dim parameters after three steps."""
    fabric = new_fabric(strategy)
    net = Gains()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ones = fabric.to_device(torch.ones(2, FEATURES)).requires_grad_()
    inputs: Any = Raises.apply(ones)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        fabric.backward(model(inputs).sum())
    used: Any = fabric.strategy
    sharded_by(used).reset()
    if refused:
        return refusal(ShardingError, lambda: fabric.setup(net)), {}
    optimizer.zero_grad()
    for batch in oracle.global_batches(3):
        x, y = own_share(fabric, batch)
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return "", gains_of(used)


class RaisesWithoutSync(Lit):
    """Raises in a context without reduction, catches it, and continues training."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        with suppress(ZeroDivisionError), strategy.block_backward_sync():
            raise ZeroDivisionError


def _losses_after_no_sync(strategy: str, tmp: str, of: str) -> list[float]:
    """The losses of three steps after an exception in a front end's or the backend's context without reduction."""
    if of == "trainer":
        module = RaisesWithoutSync("sgd")
        new_trainer(tmp, strategy, 2).fit(module, loader(3, 2))
        return means(module.losses)
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    used: Any = fabric.strategy
    context = fabric.no_backward_sync(model) if of == "fabric" else sharded_by(used).no_sync()
    with suppress(ZeroDivisionError), context:
        raise ZeroDivisionError
    losses = []
    for x, y in fabric.setup_dataloaders(loader(3, 2)):
        loss = mse_loss(model(x), y)
        losses.append(loss)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return means(losses)


class ExceptionsSuite(Clauses):
    """After an exception, a module is trained correctly, or refused: its losses are never wrong.

    Attributes:
        refused_with: Part of the error, if the library can't recover a module; ``None`` if it can.
    """

    refused_with: ClassVar[str | None] = None

    def test_a_new_trainer_goes_on_after_an_exception(self, ranks: Ranks, tmp_path: Path) -> None:
        """After an exception in a step, a new Trainer must train the same module correctly, or refuse it."""
        net = oracle.new_net()
        if self.refused_with is not None:
            want, _ = oracle.train_plain(2, oracle.sgd, net=net)
            for told, losses in ranks.run(2, _refused_after_forward, self.strategy, str(tmp_path)):
                assert_says(told, self.refused_with)
                assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
            return
        oracle.train_plain(1, oracle.sgd, net=net)
        want, _ = oracle.train_plain(2, oracle.sgd, net=net)
        for losses in ranks.run(2, _fit_after_forward, self.strategy, str(tmp_path)):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    @requires(Capability.GRADIENT_ACCUMULATION)
    @pytest.mark.parametrize("of", ["trainer", "fabric", "backend"])
    def test_an_exception_leaves_reduction_on(self, ranks: Ranks, tmp_path: Path, of: str) -> None:
        """After an exception inside ``no_sync`` or a front end's context for it, gradients must be reduced again."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        for losses in ranks.run(2, _losses_after_no_sync, self.strategy, str(tmp_path), of):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    def test_whole_parameters_stay_equal_after_an_exception(self, ranks: Ranks) -> None:
        """Gradients of an interrupted backward pass must not reach the next step, also for 0-dim parameters."""
        net = Gains()
        oracle.train_plain(3, lambda module: torch.optim.SGD(module.parameters(), lr=0.1), net=net)
        want = {"one": net.one.item(), "two": net.two.item()}
        for told, gains in ranks.run(2, _steps_after_backward, self.strategy, self.refused_with is not None):
            if self.refused_with is not None:
                assert_says(told, self.refused_with)
            else:
                assert gains == pytest.approx(want, abs=FP32_TOLERANCE)
