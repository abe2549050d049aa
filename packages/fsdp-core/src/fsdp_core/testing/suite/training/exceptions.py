"""Training after an exception."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fsdp_core.errors import ShardingError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import sharded_by
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.modules.parameters import Gains, gains_in, sgd_of_gains
from fsdp_core.testing.training import Lit, fit_module

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
        fit_module(strategy, tmp, module, 2)
    module.fail = False
    return fit_module(strategy, tmp, module, 2)[0]


def _refuse_after_forward(strategy: str, tmp: str) -> tuple[str, list[float]]:
    """The error for the interrupted module, and the losses of another one."""
    module = Failing("sgd")
    with pytest.raises(ZeroDivisionError):
        fit_module(strategy, tmp, module, 2)
    message = refusal(ShardingError, lambda: fit_module(strategy, tmp, module, 2))
    assert not module.losses
    return message, fit_module(strategy, tmp, Lit("sgd"), 2)[0]


def _steps_after_backward(strategy: str, is_refused: bool) -> tuple[str, dict[str, float]]:
    """The error for the interrupted module if it is refused, or else its 0-dim parameters after three steps."""
    loop = Loop(strategy, sgd_of_gains, Gains())
    ones = loop.fabric.to_device(torch.ones(2, FEATURES)).requires_grad_()
    inputs: Any = Raises.apply(ones)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        loop.backward(loop.model(inputs).sum())
    sharded_by(loop.fabric.strategy).reset()
    if is_refused:
        return refusal(ShardingError, lambda: loop.fabric.setup(loop.net)), {}
    loop.optimizer.zero_grad()
    _, state = loop.train(loop.batches(3))
    return "", gains_in(state)


class RaisesWithoutSync(Lit):
    """Raises and catches an exception in a context without reduction, then trains."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        with suppress(ZeroDivisionError), strategy.block_backward_sync():
            raise ZeroDivisionError


def _losses_after_no_sync(strategy: str, tmp: str, owner: str) -> list[float]:
    """The losses of three steps after an exception in the context without reduction that ``owner`` has."""
    if owner == "trainer":
        return fit_module(strategy, tmp, RaisesWithoutSync("sgd"), 3)[0]
    loop = Loop(strategy, oracle.sgd)
    context = loop.unreduced() if owner == "fabric" else sharded_by(loop.fabric.strategy).no_sync()
    with suppress(ZeroDivisionError), context:
        raise ZeroDivisionError
    return loop.train(loop.batches(3))[0]


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
            for message, losses in ranks.run(2, _refuse_after_forward, self.strategy, str(tmp_path)):
                assert_says(message, self.refused_with)
                assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
            return
        oracle.train_plain(1, oracle.sgd, net=net)
        want, _ = oracle.train_plain(2, oracle.sgd, net=net)
        for losses in ranks.run(2, _fit_after_forward, self.strategy, str(tmp_path)):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    @requires(Capability.GRADIENT_ACCUMULATION)
    @pytest.mark.parametrize("owner", ["trainer", "fabric", "backend"])
    def test_an_exception_leaves_reduction_on(self, ranks: Ranks, tmp_path: Path, owner: str) -> None:
        """After an exception inside ``no_sync`` or a front end's context for it, gradients must be reduced again."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        for losses in ranks.run(2, _losses_after_no_sync, self.strategy, str(tmp_path), owner):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    def test_whole_parameters_stay_equal_after_an_exception(self, ranks: Ranks) -> None:
        """Gradients of an interrupted backward pass must not reach the next step, also for 0-dim parameters."""
        _, state = oracle.train_plain(3, sgd_of_gains, net=Gains())
        want = gains_in(state)
        for message, gains in ranks.run(2, _steps_after_backward, self.strategy, self.refused_with is not None):
            if self.refused_with is not None:
                assert_says(message, self.refused_with)
            else:
                assert gains == pytest.approx(want, abs=FP32_TOLERANCE)
