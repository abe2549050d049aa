"""Checkpoints without frozen parameters: what is left out of them, noticed if it changes, and taken from the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import fsdp_core
from fsdp_core.checkpoint import read_manifest
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.checkpoints.async_saves import AtStep
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal, loaded
from fsdp_core.testing.training import Lit, loader, new_trainer

__all__ = ["FrozenParametersSuite"]

_OPTIONS = {"save_frozen": False}


class _OtherBase(Lit):
    """A module that was built with another bias in its frozen layer."""

    def __init__(self) -> None:
        super().__init__("momentum")
        with torch.no_grad():
            self.net.frozen.bias.add_(1)


def _save_before_and_after_a_write(strategy: str, tmp: str) -> list[dict[str, Any]]:
    """Save, write to a frozen parameter, and save again; return what the module had each time."""
    module = Lit("momentum")
    states: list[dict[str, Any]] = []

    def save_twice(trainer: pl.Trainer) -> None:
        for name in ("before", "after"):
            trainer.save_checkpoint(f"{tmp}/{name}")
            optimizer_state = full_optimizer_state(trainer.strategy, trainer.optimizers[0])
            states.append({"model": full_state(trainer.strategy), "optimizer": optimizer_state})
            with fsdp_core.gathered(module, modifier_rank=0):
                module.net.frozen.bias.data.mul_(-1)

    run = new_trainer(tmp, strategy, 2, _OPTIONS, callbacks=[AtStep(2, save_twice)])
    run.fit(module, loader(2, 2))
    return states


def _refusal(strategy: str, tmp: str) -> str:
    """The error of a run that resumes with another base."""
    try:
        new_trainer(tmp, strategy, 1, _OPTIONS, max_epochs=2).fit(_OtherBase(), loader(2, 1), ckpt_path=f"{tmp}/before")
    except CheckpointMismatchError as error:
        return str(error)
    return "nothing was raised"


class FrozenParametersSuite(Clauses):
    """With ``save_frozen=False``, checkpoints hold what differs from what the module was built with, and no more."""

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_what_was_not_trained_is_left_out(self, ranks: Ranks, tmp_path: Path) -> None:
        """Frozen parameters must be left out until they are written to, and be there again after a load."""
        tmp = str(tmp_path)
        before, after = ranks.run(2, _save_before_and_after_a_write, self.strategy, tmp)[0]
        left_out = {name: set(read_manifest(f"{tmp}/{name}").left_out) for name in ("before", "after")}
        assert left_out["before"] == {"model/net.frozen.weight", "model/net.frozen.bias"}
        assert left_out["after"] == {"model/net.frozen.weight"}, "a frozen parameter that was written to is left out"
        for name, want in (("before", before), ("after", after)):
            for got in ranks.run(1, loaded, self.strategy, tmp, 1, "momentum", f"{tmp}/{name}", _OPTIONS):
                assert_bit_equal(got, want)
        for message in ranks.run(1, _refusal, self.strategy, tmp):
            assert "'net.frozen.bias' has other values" in message, message
