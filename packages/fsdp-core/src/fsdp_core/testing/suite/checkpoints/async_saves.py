"""Checkpoints written in the background hold what there was at the call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO

import fsdp_core
from fsdp_core.checkpoint import is_checkpoint, load
from fsdp_core.testing import Ranks
from fsdp_core.testing.measuring.disks import Disk, disk
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, requires
from fsdp_core.testing.training import Lit, loader, new_trainer

__all__ = ["ASYNC", "AtStep", "DeferredCopiesSuite", "options_of"]

ASYNC = {"async_save": True}


class Slow(TorchCheckpointIO):
    """Writes full checkpoints as slowly as a :class:`~fsdp_core.testing.measuring.disks.Disk`."""

    def __init__(self, used: Disk) -> None:
        self.used = used

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Wait, reserve the space, and write."""
        self.used.wait()
        self.used.take(1000)
        super().save_checkpoint(checkpoint, path, storage_options)


def options_of(kind: str, used: Disk) -> dict[str, Any]:
    """The options for background saves of this kind to this disk."""
    full = {"state_dict_type": "full", "checkpoint_io": Slow(used)}
    return {**ASYNC, **(full if kind == "full" else {})}


class AtStep(pl.Callback):
    """Calls a function once, after a training step."""

    def __init__(self, step: int, do: Callable[[pl.Trainer], None]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call the function."""
        if batch_idx + 1 == self.step:
            self.step = 0
            self.do(trainer)


def _changed_at_once(strategy: str, tmp: str, kind: str) -> tuple[bool, bool]:
    """Save while fitting, and change all weights and plain data as soon as the call returns."""
    path = f"{tmp}/it"
    want = {}
    module = Lit("momentum")
    note = module.hparams.setdefault("note", {"kept": True})
    complete: list[bool] = []

    def save(trainer: pl.Trainer) -> None:
        want.update(full_state(trainer.strategy))
        trainer.save_checkpoint(path)
        complete.append(Path(path).is_file() or is_checkpoint(path))
        note["kept"] = False
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
        used.opened.set()

    with disk(opened=False) as used:
        run = new_trainer(tmp, strategy, 2, options_of(kind, used), callbacks=[AtStep(1, save)])
        run.fit(module, loader(2, 2))
    saved = fsdp_core.load_state_dict(path)
    assert saved.keys() == want.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in want.items())
    everything: Any = torch.load(path, weights_only=True) if kind == "full" else load(path)["trainer"]
    return complete[0], everything["hyper_parameters"]["note"]["kept"]


class DeferredCopiesSuite(Clauses):
    """With ``async_save=True``, a checkpoint holds what there was at the call: tensors are copied in time."""

    @requires("async_save")
    @KINDS
    def test_what_is_changed_after_the_call_is_not_saved(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Changes to weights and plain data after ``save_checkpoint()`` returns must not reach the checkpoint."""
        for complete, is_kept in ranks.run(2, _changed_at_once, self.strategy, str(tmp_path), kind):
            assert not complete, "the save was complete when the call returned, so this test shows nothing"
            assert is_kept, "a change made after the call is in the checkpoint"
