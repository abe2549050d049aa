"""Callbacks and plugins of Lightning that look at whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.functional import mse_loss

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.training import Lit, loader, means, new_trainer

__all__ = ["LightningToolsSuite"]


class Tunable(Lit):
    """Has the attribute ``lr`` that the tuner needs; its optimizer uses a fixed learning rate."""

    lr = 0.05


def _find_learning_rate(strategy: str, tmp: str) -> tuple[int, list[float], list[str]]:
    module = Tunable("sgd")
    run = new_trainer(tmp, strategy, 2, enable_checkpointing=True)
    before = means([mse_loss(module.net(x), y) for x, y in oracle.global_batches(1)])
    found = Tuner(run).lr_find(module, loader(10, 2), num_training=8, update_attr=False)
    assert found is not None
    run.validate(module, loader(1, 2), verbose=False)
    after = means(module.validation_losses)
    return len(found.results["loss"]), [*before, *after], [p.name for p in Path(tmp).iterdir() if "lr_find" in p.name]


def _stochastic_averaging(strategy: str, tmp: str) -> str:
    run = new_trainer(tmp, strategy, 2, callbacks=[StochasticWeightAveraging(swa_lrs=0.01)])
    return refusal(MisconfigurationException, lambda: run.fit(Lit(), loader(1, 2)))


class Counts(ModelSummary):
    """Records the parameter counts that it would print."""

    counts: Any = None

    def summarize(  # type: ignore[override]
        self, summary_data: Any, total_parameters: int, trainable_parameters: int, *args: Any, **kwargs: Any
    ) -> None:
        self.counts = (total_parameters, trainable_parameters, dict(summary_data)["Params"])


def _summary(strategy: str, tmp: str) -> Any:
    callback = Counts(max_depth=1)
    run = new_trainer(tmp, strategy, 2, callbacks=[callback], enable_model_summary=True)
    run.fit(Lit(), loader(1, 2))
    return callback.counts


class CountingScaler(torch.amp.GradScaler):
    """Counts its steps."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


def _custom_scaler(strategy: str, tmp: str) -> tuple[int, list[float]]:
    scaler = CountingScaler("cpu", init_scale=2.0**8)
    module = Lit("sgd")
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    new_trainer(tmp, strategy, 2, plugins=[plugin]).fit(module, loader(3, 2))
    return scaler.steps, means(module.losses)


class LightningToolsSuite(Clauses):
    """Callbacks and plugins of Lightning that look at whole models."""

    def test_stochastic_weight_averaging_is_refused_before_training(self, ranks: Ranks, tmp_path: Path) -> None:
        """``StochasticWeightAveraging`` must be refused before training."""
        for message in ranks.run(2, _stochastic_averaging, self.strategy, str(tmp_path)):
            assert_says(message, "sharded")

    def test_model_summary_counts_the_whole_model(self, ranks: Ranks, tmp_path: Path) -> None:
        """The model summary must count the parameters of the whole model, not of a shard."""
        net = oracle.new_net()
        total = sum(p.numel() for p in net.parameters())
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert ranks.run(2, _summary, self.strategy, str(tmp_path))[0][:2] == (total, trainable)

    @requires(Capability.MIXED_PRECISION, Capability.GRADIENT_SCALING)
    def test_custom_gradient_scaler(self, ranks: Ranks, tmp_path: Path) -> None:
        """A user's own ``GradScaler`` must be used, and losses must equal the oracle's."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        for steps, losses in ranks.run(2, _custom_scaler, self.strategy, str(tmp_path)):
            assert steps == 3, f"the scaler made {steps} steps instead of 3"
            assert losses == pytest.approx(want, rel=HALF_TOLERANCE)

    def test_lr_finder_restores_the_weights(self, ranks: Ranks, tmp_path: Path) -> None:
        """``Tuner.lr_find`` must try all rates, restore the weights, and delete its checkpoint."""
        for tried, (before, after), leftovers in ranks.run(2, _find_learning_rate, self.strategy, str(tmp_path)):
            assert tried == 8, f"the learning-rate finder tried {tried} rates instead of 8"
            assert after == pytest.approx(before, abs=FP32_TOLERANCE)
            assert not leftovers
