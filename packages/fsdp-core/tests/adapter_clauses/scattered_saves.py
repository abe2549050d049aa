"""Ranks that stand in different folders: each saves where it stands, and what is joined is what one folder would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss

from fsdp_core.checkpoint import gather, is_checkpoint, load, load_state_dict, read_manifest, verify
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal, loaded
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["ScatteredSavesSuite"]


class Keeping(pl.Callback):
    """Saves to a folder of each rank's own, and removes the checkpoint before, as ``ModelCheckpoint`` does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save what is removed later."""
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save what stays."""
        trainer.save_checkpoint(self.folder / "last.ckpt")
        for step in range(1, trainer.global_step + 1):
            trainer.strategy.remove_checkpoint(self.folder / f"step={step}.ckpt")


def _trained(strategy: str, tmp: str) -> dict[str, Any]:
    """Fit with saves in the background, each rank's to its own folder; the whole state at the end."""
    module, folder = Lit("adamw_groups"), Path(tmp, f"rank{rank_context().rank}")
    options = {"scattered_save": True, "async_save": True}
    run = new_trainer(tmp, strategy, 2, options, callbacks=[Keeping(folder)])
    run.fit(module, loader(2, 2))
    return {"model": full_state(run.strategy), "optimizer": full_optimizer_state(run.strategy, run.optimizers[0])}


def _goes_on(strategy: str, tmp: str, places: Any) -> list[str]:
    """Resume from places, and save and remove checkpoints as ever; those that are left."""
    folder = Path(tmp, f"next of {len(places)}")
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}")
    loop: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 4}
    run = new_trainer(tmp, strategy, 2, **loop)
    run.fit(Lit("adamw_groups"), loader(2, 2), ckpt_path=places)
    return sorted(path.name for path in folder.iterdir())


def _under_fabric(strategy: str, world_size: int, path: Any, save: bool) -> dict[str, Any]:
    """Train a step and save, each rank to its own folder; or load the places. The whole state."""
    fabric = new_fabric(strategy, world_size, {"scattered_save": True})
    with oracle.seeded(1 if save else 7):
        net = oracle.Net()
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    state = {"model": model, "optimizer": optimizer}
    if save:
        for x, y in whole_batches(fabric, 1):
            fabric.backward(mse_loss(model(x), y))
            optimizer.step()
        fabric.save(Path(path, f"rank{rank_context().rank}", "last.ckpt"), state)
    else:
        fabric.load(path, state)
    used: Any = fabric.strategy
    return {"model": full_state(used), "optimizer": full_optimizer_state(used, optimizer)}


class ScatteredSavesSuite(Clauses):
    """With ``scattered_save=True``, each rank saves where it stands, and ``gather`` joins the places."""

    @requires("scattered_save")
    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_scattered_save(self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd) -> None:
        """Places must be loaded, and joined, as what was saved, bit for bit; one of them alone must be refused."""
        tmp, out = str(tmp_path), str(tmp_path / "whole.ckpt")
        if front_end == "trainer":
            saved = ranks.run(2, _trained, self.strategy, tmp)[0]
        else:
            saved = ranks.run(2, _under_fabric, self.strategy, 2, tmp, True)[0]
        places = [tmp_path / f"rank{rank}" / "last.ckpt" for rank in range(2)]
        assert [path for path in tmp_path.rglob("*.ckpt") if not is_checkpoint(path)] == places[1:]
        for place in places:
            assert [path.name for path in place.parent.iterdir()] == ["last.ckpt"]
        # a library may pad a small model so far that rank 0 holds all of it
        lacking = [name for name in read_manifest(places[0]).files if not (places[0] / name).exists()]
        for place in places if lacking else places[1:]:
            told = refusal(CheckpointFormatError, lambda place=place: load(place))  # type: ignore[misc]
            assert_says(told, "scattered save", "fsdp checkpoint gather", "rank 1")
        together = [str(place) for place in places]
        if front_end == "trainer":
            got = ranks.run(3, loaded, self.strategy, tmp, 3, "adamw_groups", together)[0]
        else:
            got = ranks.run(3, _under_fabric, self.strategy, 3, together, False)[0]
        assert_bit_equal(got, saved)
        gather(places, out)
        verify(out)
        if front_end == "trainer":
            for several in (together, [out]):
                assert all(left == ["epoch=3.ckpt"] for left in ranks.run(2, _goes_on, self.strategy, tmp, several))
        joined, apart = load_state_dict(out), load_state_dict(together)
        assert joined.keys() == apart.keys()
        assert all(torch.equal(joined[name], tensor) for name, tensor in apart.items())
