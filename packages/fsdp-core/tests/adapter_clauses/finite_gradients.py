"""The option ``error_if_nonfinite``: all ranks stop before a step whose gradients are not finite on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core import load_state_dict
from fsdp_core.errors import NonFiniteGradientError, UnsupportedCapabilityError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import FP32_TOLERANCE, WIDE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state, poison_gradient, sharded_by, trained_by
from fsdp_core.testing.suite.base_class import Clauses
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["FiniteGradientsSuite"]

STOPS = {"error_if_nonfinite": True}


class Breaks(Lit):
    """One element of one gradient is NaN, on one rank, from the second micro-batch on."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        broken = batch_idx >= 1 and rank_context().rank == self.trainer.world_size - 1
        # not a scalar, which XLA may write into the program as a constant: programs must be the same on all ranks
        factors = torch.tensor([torch.nan if broken else 0.0, 0.0]).to(loss.device)
        return loss + factors[0] * self.net.inp.weight[0, 0]


class BreaksByHand(Breaks):
    """The same in manual optimization, with clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()


def _fitted(
    strategy: str, tmp: str, module_class: type[Breaks], trainer: dict[str, Any]
) -> tuple[str, int, dict[str, Tensor]]:
    """What is raised, the steps that were taken, and the weights from then on."""
    module = module_class()
    run = new_trainer(tmp, strategy, 2, STOPS, **trainer)
    told = refusal(NonFiniteGradientError, lambda: run.fit(module, loader(4, 2)))
    return told, run.global_step, full_state(run.strategy)


def _saved_on_exception(strategy: str, tmp: str) -> tuple[str, int, dict[str, Tensor]]:
    callbacks: list[pl.Callback] = [OnExceptionCheckpoint(tmp, filename="stopped")]
    trainer = {"gradient_clip_val": 1.0, "callbacks": callbacks, "enable_checkpointing": True}
    return _fitted(strategy, tmp, Breaks, trainer)


def _stepped(strategy: str, clip: bool) -> tuple[list[str], list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Under Fabric: what is raised in the second step, the parameter's name, and the weights before and after."""
    fabric = new_fabric(strategy, options=STOPS)
    net = oracle.new_net(width=WIDE)  # of which every rank holds something, whatever a library pads shards to
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    used: Any = fabric.strategy
    told, names, states = [], [], []
    for number, (x, y) in enumerate(whole_batches(fabric, 3)):
        fabric.backward(mse_loss(model(x), y))
        if number == 1:
            is_last = rank_context().rank == rank_context().shares(2) - 1
            layout = sharded_by(used).layout()
            wide = [p for p in trained_by(optimizer) if any(".up." in x.name or ".down." in x.name for x in layout[p])]
            poison_gradient(wide, float("inf"), on_this_rank=is_last)
            broken = [
                p for p in layout if p.grad is not None and not torch.isfinite(rank_context().local(p.grad)).all()
            ]
            names = [layout[p][0].name for p in broken]

        def step() -> None:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

        if number == 1:
            states.append(full_state(used))
            told.append(refusal(NonFiniteGradientError, step))
            states.append(full_state(used))
        else:
            step()
        optimizer.zero_grad()
    return told, names, states[0], states[1]


class FiniteGradientsSuite(Clauses):
    """With ``error_if_nonfinite=True``, no rank takes a step whose gradients are not finite on one of them."""

    @pytest.mark.parametrize("clip", [False, pytest.param(True)])
    def test_all_ranks_stop_before_a_step_that_is_not_finite(self, ranks: Ranks, clip: bool) -> None:
        """Under Fabric all ranks must raise, name the parameter, leave the weights, and be able to go on."""
        got = ranks.run(2, _stepped, self.strategy, clip)
        (name,) = {name for _, names, _, _ in got for name in names}
        for (told,), _, before, after in got:
            assert_says(told, "before step 2 of this run", "1 parameter of SGD", repr(name), "set_detect_anomaly")
            torch.testing.assert_close(after, before, rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("module_class", "trainer", "steps"),
        [pytest.param(Breaks, {"accumulate_grad_batches": 2}, 0), pytest.param(BreaksByHand, {}, 1)],
        ids=["accumulated", "by hand"],
    )
    def test_fit_stops_before_a_step_that_is_not_finite(
        self, ranks: Ranks, tmp_path: Path, module_class: type[Breaks], trainer: dict[str, Any], steps: int
    ) -> None:
        """Under the Trainer all ranks must raise before the step, and name the one parameter and the step."""
        for told, taken, _ in ranks.run(2, _fitted, self.strategy, str(tmp_path), module_class, trainer):
            assert_says(told, f"before step {steps + 1},", "1 parameter of SGD", "'net.inp.weight'", "learning rate")
            assert taken == steps

    def test_checkpoint_of_the_exception_is_that_of_the_step_before(self, ranks: Ranks, tmp_path: Path) -> None:
        """A checkpoint that Lightning saves on the exception must hold the weights of the last good step."""
        want_losses, want = oracle.train_plain(1, oracle.sgd, clip_norm=1.0)
        assert len(want_losses) == 1, f"one process has taken {len(want_losses)} steps instead of one"
        for told, taken, state in ranks.run(2, _saved_on_exception, self.strategy, str(tmp_path)):
            assert_says(told, "before step 2,", "1 parameter of SGD", "'net.inp.weight'", "can be saved")
            assert taken == 1, f"{taken} steps were taken instead of one"
            saved = load_state_dict(next(tmp_path.glob("stopped*")))
            for name, tensor in want.items():
                torch.testing.assert_close(state[f"net.{name}"], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
                assert torch.equal(saved[f"net.{name}"], state[f"net.{name}"].cpu()), name

    def test_error_if_nonfinite_is_a_bool(self) -> None:
        """Anything but a bool must be refused."""
        told = refusal(UnsupportedCapabilityError, lambda: new_fabric(self.strategy, options={"error_if_nonfinite": 1}))
        assert_says(told, "error_if_nonfinite=1", "Write True")
