"""Param groups that an optimizer gets after the checkpoint was loaded: they go on with the state that was saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from fsdp_core.errors import CheckpointError, CheckpointMismatchError, UnsupportedCapabilityError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.checkpoints.resuming import assert_same
from fsdp_core.testing.training import Lit, loader, new_trainer

__all__ = ["LateParamGroupsSuite"]

EPOCHS = 4
#: The epoch at the beginning of which the finetuning callback unfreezes, and the one after which a run is stopped.
UNFROZEN, STOPPED = 1, 2

#: How groups are added, and the kind of checkpoint.
WAYS = [
    ("in hooks", "sharded"),
    ("in hooks", "full"),
    ("rates set in each step", "sharded"),
    ("finetuning", "sharded"),
]
_NEEDS = {"sharded": Capability.SHARDED_CHECKPOINT, "full": Capability.FULL_CHECKPOINT}


class Growing(Lit):
    """Its optimizer begins with one block, and gets the others' param groups in hooks.

    Args:
        adds: Whether it gets them.
        lr: The learning rate that a hook sets for all groups in each step; ``None`` to keep them.
        saves: Where to save a checkpoint before the last group is added, if anywhere.
    """

    def __init__(self, adds: bool = True, lr: float | None = None, saves: str | None = None) -> None:
        super().__init__(blocks=3)
        self.adds = adds
        self.lr = lr
        self.saves = saves
        self.rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.blocks[0].parameters(), lr=0.01)

    def _add(self, block: int) -> None:
        optimizer: Any = self.optimizers()  # Lightning's wrapper
        if self.adds and len(optimizer.param_groups) <= block:
            optimizer.add_param_group({"params": list(self.net.blocks[block].parameters()), "lr": 0.02 * block})

    def on_train_start(self) -> None:
        self._add(1)
        if self.saves is not None:
            self.trainer.save_checkpoint(self.saves)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._add(2)
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        if self.lr is not None:
            for group in groups:
                group["lr"] = self.lr

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups[1:]:
            group["lr"] *= 0.9  # what a hook has set is part of the saved settings


class Thawing(BaseFinetuning):
    """Freezes two blocks at first, and adds one of them to the optimizer at the beginning of an epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze([pl_module.net.blocks[1], pl_module.net.blocks[2]])  # type: ignore[union-attr,index]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == UNFROZEN:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[1], optimizer, lr=0.02)  # type: ignore[union-attr,index]


class Thawed(Lit):
    """Its optimizer gets the parameters that are trainable at the beginning."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def _outcome(module: Any, run: pl.Trainer) -> dict[str, Any]:
    return {
        "losses": [loss.item() for loss in module.losses],
        "rates": module.rates,
        "model": full_state(run.strategy),
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }


def _continue_run(strategy: str, tmp: str, how: str, kind: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a refusal of the callback, or the outcomes of an uninterrupted and a resumed run after the checkpoint."""

    def module() -> Any:
        return Thawed() if how == "finetuning" else Growing(lr=0.005 if how == "rates set in each step" else None)

    def trainer(epochs: int) -> pl.Trainer:
        callbacks = [Thawing()] if how == "finetuning" else []
        return new_trainer(tmp, strategy, 2, {"state_dict_type": kind}, max_epochs=epochs, callbacks=callbacks)

    uninterrupted_module = module()
    run = trainer(EPOCHS)
    message = refusal(UnsupportedCapabilityError, lambda: run.fit(uninterrupted_module, loader(2, 2)))
    if was_refused(message):
        return message, {}, {}
    uninterrupted = _outcome(uninterrupted_module, run)
    first = module()
    stopped = trainer(STOPPED)
    stopped.fit(first, loader(2, 2))
    stopped.save_checkpoint(f"{tmp}/checkpoint")
    second = module()
    resumed = trainer(EPOCHS)
    resumed.fit(second, loader(2, 2), ckpt_path=f"{tmp}/checkpoint")
    steps = len(first.losses)
    after = {key: uninterrupted[key][steps:] for key in ("losses", "rates")}
    return message, {**uninterrupted, **after}, _outcome(second, resumed)


def _collect_refusals(strategy: str, tmp: str) -> tuple[list[str], list[bool]]:
    module = Growing()
    run = new_trainer(tmp, strategy, 2)
    run.fit(module, loader(2, 2))
    run.save_checkpoint(f"{tmp}/checkpoint")
    never_adding, saving_early = Growing(adds=False), Growing(saves=f"{tmp}/early")
    trained: list[bool] = []
    messages = []
    for error, refused_module in ((CheckpointMismatchError, never_adding), (CheckpointError, saving_early)):
        again = new_trainer(tmp, strategy, 2, max_epochs=2)
        resume = partial(again.fit, refused_module, loader(2, 2), ckpt_path=f"{tmp}/checkpoint")
        messages.append(refusal(error, resume))
        saved, state = full_state(run.strategy), full_state(again.strategy)
        trained.append(any(not torch.equal(state[name], saved[name]) for name in saved))
    return messages, trained


class LateParamGroupsSuite(Clauses):
    """Param groups that hooks add after a checkpoint was loaded get their saved state when they are added."""

    @pytest.mark.parametrize(("how", "kind"), [pytest.param(*way, marks=requires(_NEEDS[way[1]])) for way in WAYS])
    def test_param_groups_that_are_added_late(self, ranks: Ranks, tmp_path: Path, how: str, kind: str) -> None:
        """A resumed run must repeat the uninterrupted one bit for bit, moments and learning rates included."""
        for message, uninterrupted, resumed in ranks.run(2, _continue_run, self.strategy, str(tmp_path), how, kind):
            if was_refused(message):
                assert_says(message, "Thawing can't be used", repr(self.own_name("trainer")), "configure_optimizers()")
            else:
                assert resumed["rates"] == uninterrupted["rates"]
                assert_same(resumed, uninterrupted)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_param_groups_that_never_come(self, ranks: Ranks, tmp_path: Path) -> None:
        """Saved state that no param group takes must be refused before a step, and before a save that would lose it."""
        for (never, early), trained in ranks.run(2, _collect_refusals, self.strategy, str(tmp_path)):
            assert_says(never, "the checkpoint's optimizer also holds", "'net.blocks.1.", "on_train_start")
            assert_says(early, "before the optimizer got its parameters", "'net.blocks.2.", "after the first step")
            assert trained == [False, False]
