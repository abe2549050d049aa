"""Exact resume: a resumed run repeats the uninterrupted one, bit for bit on the same number of ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fsdp_core
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import BATCH, FEATURES, RESUME_TOLERANCE
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, needs_of, requires, with_options
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.training import Lit, loader, means, new_trainer

__all__ = [
    "MOMENTS",
    "ExactResumeSuite",
    "Scheduled",
    "assert_goes_on_between_micro_batches",
    "assert_same",
    "continued",
    "fit_seeded",
    "noisy_batches",
]

#: Batches per epoch; with two micro-batches per step, the last step has one.
STEPS, EPOCHS = 5, 3

#: When a checkpoint is saved: the hook, the batch index in the second epoch, and the Trainer's arguments.
MOMENTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "between two steps": ("on_train_batch_end", 1, {}),
    "between the micro-batches of a step": ("on_train_batch_end", 2, {}),
    "before a validation within the epoch": ("on_train_batch_end", 1, {"val_check_interval": 2}),
    "amid a validation": ("on_validation_batch_end", 1, {"val_check_interval": 2}),
    "after a validation within the epoch": ("on_validation_end", 1, {"val_check_interval": 2}),
    "after a validation between micro-batches": ("on_validation_end", 2, {"val_check_interval": 3}),
    "after the last batch": ("on_train_batch_end", 4, {}),
    "after the last batch, without validation": ("on_train_batch_end", 4, {"limit_val_batches": 0}),
    "after the last validation": ("on_validation_end", 4, {}),
    "after the epoch": ("on_train_epoch_end", 4, {}),
    "after the epoch, without validation": ("on_train_epoch_end", 4, {"limit_val_batches": 0}),
    "after the fit": ("on_fit_end", 4, {}),
}

#: Moments that differ in what a backend holds: without and with accumulated gradients, and after an epoch.
BACKEND_MOMENTS = ["between two steps", "between the micro-batches of a step", "after the epoch"]


#: Options on which a backend's handling of accumulated gradients may depend.
ACCUMULATIONS: list[dict[str, Any]] = [
    {},
    {"options": {"sync_each_batch": True}},
    {"options": {"state_dict_type": "full"}},
    {"options": {"async_save": True}},
    {"options": {"activation_checkpointing_policy": {oracle.Block}}},
    {"precision": "bf16-mixed"},
]


class Noisy(Dataset[Any]):
    """The suite's data, with noise from all random generators of the process and from the loader's worker seed."""

    def __init__(self, noise: bool) -> None:
        self.data = oracle.dataset(BATCH * STEPS)
        self.noise = noise
        self.seed = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        if self.noise:
            x = x + 0.1 * torch.randn(FEATURES) + 0.1 * random.gauss(0, 1) + 0.1 * numpy.random.randn()
            x = x + 0.1 * torch.randn(FEATURES, generator=torch.Generator().manual_seed(self.seed))
        return x, y


class SeedingLoader(DataLoader[Any]):
    """Sets its dataset's seed to the one that workers would get."""

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        dataset: Any = self.dataset
        dataset.seed = iterator._base_seed
        return iterator


class Scheduled(Lit):
    """Has dropout, param groups, a scheduler, and hooks that draw random numbers at the start and in validation.

    The numbers at the start are drawn again when a run is resumed.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__("adamw_groups", dropout=dropout, blocks=2)
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        torch.rand(3)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        torch.rand(1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if rank_context().own_generators:
            self.drawn.append(random.random())

    def configure_optimizers(self) -> Any:
        optimizer = oracle.adamw_groups(self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByHand(Scheduled):
    """Accumulates two batches by hand, under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        if batch_idx % 2:
            self.step_by_hand(loss / 2)
        else:
            self.manual_backward(loss / 2)


class Saving(pl.Callback):
    """Saves once, in a hook of the second epoch, and records the number of losses so far."""

    def __init__(self, path: str, hook: str, batch: int) -> None:
        self.path = path
        self.hook = hook
        self.batch = batch
        self.losses_before: int | None = None

    def _save(self, hook: str, trainer: pl.Trainer) -> None:
        is_at_batch = trainer.current_epoch == 1 and trainer.fit_loop.batch_idx == self.batch
        if hook == self.hook and is_at_batch and self.losses_before is None:
            module: Any = trainer.lightning_module
            self.losses_before = len(module.losses)
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save("on_train_batch_end", trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save("on_validation_batch_end", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._save("on_train_epoch_end", trainer)


def noisy_batches(world_size: int, seeded: bool) -> DataLoader[Any]:
    """A loader shuffled by Lightning's sampler, or by a seed that the loader draws itself."""
    loader_class = SeedingLoader if seeded else DataLoader
    size = BATCH // rank_context().shares(world_size) if not seeded else BATCH
    return loader_class(Noisy(noise=rank_context().own_generators), batch_size=size, shuffle=True)


def fit_seeded(
    module: Scheduled,
    strategy: str,
    tmp: str,
    world_size: int,
    seed: int,
    data: DataLoader[Any],
    resume: str | None = None,
    options: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> tuple[dict[str, Any], pl.Trainer]:
    """Fit with each rank's random generators seeded, and return the outcome and the Trainer."""
    rank = rank_context().rank  # every rank draws its own numbers
    with oracle.seeded(seed + rank):  # locked, since ranks that are threads share the generators
        random.seed(seed + rank)
        numpy.random.seed(seed + rank)
    accumulating = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3} if module.automatic_optimization else {}
    run = new_trainer(tmp, strategy, world_size, options, **{"max_epochs": EPOCHS, **accumulating, **trainer})
    run.fit(module, data, loader(1, world_size), ckpt_path=resume)
    outcome = {
        "losses": [loss.item() for loss in module.losses],
        "drawn": module.drawn,
        "model": full_state(run.strategy),
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }
    return outcome, run


def continued(
    strategy: str, tmp: str, moment: str, how: Mapping[str, Any], seeded: bool = False, by_hand: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcomes of a run that saves and continues, and of one that resumes from there, both after the save."""
    hook, batch, arguments = MOMENTS[moment]
    path = f"{tmp}/checkpoint"
    module = ByHand if by_hand else Scheduled
    arguments = {**arguments, **how, **({"use_distributed_sampler": False} if seeded else {})}
    saving = Saving(path, hook, batch)
    whole, _ = fit_seeded(module(), strategy, tmp, 2, 10, noisy_batches(2, seeded), callbacks=[saving], **arguments)
    if hook == "on_fit_end":
        _, first = fit_seeded(
            module(), strategy, tmp, 2, 10, noisy_batches(2, seeded), **{**arguments, "max_epochs": 2}
        )
        first.save_checkpoint(path)
        saving.losses_before = 2 * STEPS
    resumed, _ = fit_seeded(module(), strategy, tmp, 2, 90, noisy_batches(2, seeded), resume=path, **arguments)
    assert saving.losses_before is not None
    return {
        **whole,
        "losses": whole["losses"][saving.losses_before :],
        "drawn": whole["drawn"][saving.losses_before :],
    }, resumed


def _plain_data(world_size: int) -> DataLoader[Any]:
    """The same global batches on any number of ranks, without noise."""
    data: Any = Noisy(noise=False)
    shares = rank_context().shares(world_size)
    sampler: Any = DistributedSampler(data, shares, rank_context().rank, seed=3)
    return DataLoader(data, batch_size=BATCH // shares, sampler=sampler)


def _elsewhere(
    strategy: str, tmp: str, world_size: int, path: str, moment: str, resume: bool, options: Mapping[str, Any]
) -> list[float]:
    """The mean losses of a run without randomness, after its save or after its resume."""
    hook, batch, arguments = MOMENTS[moment]
    saving = Saving(path, hook, batch)
    data = _plain_data(world_size)
    module = Scheduled(dropout=0.0)
    trainer = {**arguments, "callbacks": [] if resume else [saving], "options": options}
    fit_seeded(module, strategy, tmp, world_size, 10, data, resume=path if resume else None, **trainer)
    return means(module.losses)[saving.losses_before or 0 :]


def _train_under_fabric(strategy: str, tmp: str, kind: str, load: bool) -> dict[str, Any]:
    """The outcome of a loop that saves between two micro-batches and continues, or of one that resumes from there."""
    loop = Loop(strategy, oracle.adamw_groups, oracle.new_net(dropout=0.2), options={"state_dict_type": kind})
    with oracle.seeded(100 * load + loop.fabric.global_rank):  # devices have their own generators
        pass
    state: dict[str, Any] = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "random": fsdp_core.RandomState(),
        "gradients": fsdp_core.AccumulatedGradients(loop.model),
        "batch": 0,
    }
    if load:
        assert loop.fabric.load(f"{tmp}/fabric", state) == {}
    losses = []
    for x, y in loop.batches(8)[state["batch"] :]:
        is_last = state["batch"] % 2 == 1
        with loop.unreduced(not is_last):
            loss = loop.loss(x, y)
            loop.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=0.3)
            loop.step()
        state["batch"] += 1
        if not load and state["batch"] == 3:
            loop.fabric.save(f"{tmp}/fabric", state)
            losses = []
    moments = full_optimizer_state(loop.fabric.strategy, loop.optimizer)
    return {"losses": losses, "model": loop.state(), "optimizer": moments}


def assert_same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Assert that two runs have the same losses, random numbers, weights and optimizer state."""
    assert got["losses"] == want["losses"]
    assert got.get("drawn") == want.get("drawn")
    assert_bit_equal(got, want)


def assert_goes_on_between_micro_batches(ranks: Ranks, tmp_path: Path, strategy: str, how: Mapping[str, Any]) -> None:
    """Assert that accumulated gradients are restored bit for bit. Backends may pass their own options."""
    moment = "between the micro-batches of a step"
    for whole, resumed in ranks.run(2, continued, strategy, str(tmp_path), moment, how):
        assert_same(resumed, whole)


def _accumulating(how: Mapping[str, Any]) -> Any:
    options = how.get("options", {})
    needs = needs_of(options)
    if "precision" in how:
        needs.append(Capability.MIXED_PRECISION)
    if options.get("state_dict_type") != "full":
        needs.append(Capability.SHARDED_CHECKPOINT)
    return pytest.param(how, marks=requires(*needs), id=str(how))


class ExactResumeSuite(Clauses):
    """Losses, weights, optimizer state and random numbers after a resume are those of an uninterrupted run.

    Runs use dropout, random data, a schedule, clipping, gradient accumulation, param groups, and parameters that are
    frozen, tied, 0-dim or of uneven sizes.
    """

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.CLIP_BY_NORM, Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("moment", BACKEND_MOMENTS)
    def test_resume_is_exact(self, ranks: Ranks, tmp_path: Path, moment: str) -> None:
        """A resumed run must repeat the uninterrupted one bit for bit."""
        for whole, resumed in ranks.run(2, continued, self.strategy, str(tmp_path), moment, {}):
            assert_same(resumed, whole)

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("how", [_accumulating(how) for how in ACCUMULATIONS])
    def test_accumulated_gradients(self, ranks: Ranks, tmp_path: Path, how: dict[str, Any]) -> None:
        """A checkpoint saved between micro-batches must restore accumulated gradients bit for bit."""
        assert_goes_on_between_micro_batches(ranks, tmp_path, self.strategy, how)

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.MANUAL_OPTIMIZATION, Capability.SHARDED_CHECKPOINT)
    def test_gradients_accumulated_by_hand(self, ranks: Ranks, tmp_path: Path) -> None:
        """Gradients accumulated under manual optimization must be restored bit for bit."""
        moment = "between the micro-batches of a step"
        for whole, resumed in ranks.run(2, continued, self.strategy, str(tmp_path), moment, {}, False, True):
            assert_same(resumed, whole)

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.CLIP_BY_NORM, Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        ("saved_on", "resumed_on", "options"),
        [(2, 1, {}), (1, 2, {}), (2, 3, {}), with_options({"sync_each_batch": True}, 2, 3, {"sync_each_batch": True})],
        ids=["2 to 1", "1 to 2", "2 to 3", "2 to 3, sync_each_batch"],
    )
    def test_on_another_number_of_ranks(
        self, ranks: Ranks, tmp_path: Path, saved_on: int, resumed_on: int, options: dict[str, Any]
    ) -> None:
        """On another world size, a run without randomness must resume with accumulated gradients, up to rounding."""
        tmp = str(tmp_path)
        path = str(tmp_path / "checkpoint")
        moment = "between the micro-batches of a step"
        whole = ranks.run(saved_on, _elsewhere, self.strategy, tmp, saved_on, path, moment, False, options)[0]
        resumed = ranks.run(resumed_on, _elsewhere, self.strategy, tmp, resumed_on, path, moment, True, options)[0]
        expected = STEPS * EPOCHS - STEPS - 3
        message = f"{len(whole)} uninterrupted and {len(resumed)} resumed steps instead of {expected}"
        assert len(whole) == len(resumed) == expected, message
        assert resumed == pytest.approx(whole, abs=RESUME_TOLERANCE)

    @requires(Capability.GRADIENT_ACCUMULATION, Capability.CLIP_BY_NORM)
    @KINDS
    def test_resume_is_exact_under_fabric(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Under Fabric, a run that saves and loads RandomState and AccumulatedGradients must repeat bit for bit."""
        whole, resumed = (
            ranks.run(2, _train_under_fabric, self.strategy, str(tmp_path), kind, load) for load in (False, True)
        )
        for got, want in zip(resumed, whole, strict=True):
            assert_same(got, want)
