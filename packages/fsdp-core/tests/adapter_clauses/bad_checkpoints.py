"""Checkpoints that adapters refuse to load or to save, whatever the backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

import fsdp_core
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError, CheckpointValueError
from fsdp_core.testing import RankPool, Ranks, oracle
from fsdp_core.testing.refusals import assert_says, assert_unchanged, refusal
from fsdp_core.testing.state import copied_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, on_ranks
from fsdp_core.testing.suite.refusals.bad_checkpoints import (
    MISFITS,
    WIDTH,
    MoreGroups,
    MoreTrained,
    Renamed,
    Resized,
    SavedAt,
    SavesOnce,
    load_misfit,
    new_lit,
    refused_by_fabric,
    refused_by_trainer,
)
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = ["BadCheckpointsOfAdaptersSuite"]


def _flip_a_weight_of_rank_one(path: Path) -> None:
    (file,) = path.glob("model/*-rank-00001.*")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _replace_by_pickle(path: Path) -> None:
    shutil.rmtree(path)
    torch.save({"state_dict": {}, "hyper_parameters": RankPool}, path)


def _move_a_part_out(path: Path) -> None:
    (file,) = path.glob("model/*-rank-00000.*")
    file.rename(path.parent / "outside")
    file.symlink_to(path.parent / "outside")


#: Damage to a valid checkpoint, and parts of the error. test_checkpoint_faults.py has all that readers refuse.
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (shutil.rmtree, ["there is no checkpoint", "Check the path"]),
    "flipped weight": (_flip_a_weight_of_rank_one, ["rank-00001.safetensors has the checksum", "Restore these files"]),
    "part outside": (_move_a_part_out, ["is a link to", "outside of the checkpoint", "Nothing was read"]),
    "pickle": (_replace_by_pickle, ["can't be read", "RankPool", "add_safe_globals"]),
}


def _load_damaged(strategy: str, tmp: str, path: str) -> list[str]:
    return [
        refused_by_trainer(strategy, tmp, path, new_lit(), CheckpointFormatError),
        refused_by_trainer(strategy, tmp, path, new_lit(), CheckpointFormatError, "validate"),
        refused_by_fabric(strategy, path, new_lit(), CheckpointFormatError),
    ]


class RegroupsLater(Lit):
    """Builds the saved param groups, and changes them after they are loaded: only one parameter is trained further."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=WIDTH)

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers()
        for group in list(optimizer.param_groups):
            group["params"], others = group["params"][:1], group["params"][1:]
            optimizer.add_param_group({"params": others, "lr": 0.0})
        optimizer.param_groups[1]["lr"] = 0.0


def _regrouped(strategy: str, tmp: str, path: str) -> tuple[list[str], list[str]]:
    """The names of the parameters that have changed since the checkpoint, and of those that should."""
    run, module = new_trainer(tmp, strategy, 2, max_epochs=2), RegroupsLater()
    run.fit(module, loader(1, 2), ckpt_path=path)
    used: Any = run.strategy
    before, now, layout = fsdp_core.load_state_dict(path), full_state(used), used.sharded.layout()
    kept = [part.name for p in run.optimizers[0].param_groups[0]["params"] for part in layout[p]]
    return [name for name, tensor in before.items() if not torch.equal(tensor, now[name].cpu())], kept


def _load_absent_key(strategy: str, tmp: str, path: str) -> tuple[str, str]:
    """Fabric's error for a missing key, and the Trainer's error for Fabric's checkpoint."""
    fabric = new_fabric(strategy)
    lit = Lit()
    nn.init.ones_(lit.net.inp.weight)
    before = copied_state(lit)
    model = fabric.setup(lit)
    told = refusal(KeyError, lambda: fabric.load(path, {"model": model, "scheduler": {}}))
    assert_unchanged(fabric.strategy, before)
    return told, refused_by_trainer(strategy, tmp, path, Lit(), KeyError)


def _save_over_a_folder(strategy: str, tmp: str, kind: str) -> list[str]:
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind})
    run.fit(Lit(), loader(1, 2))
    fabric = new_fabric(strategy, 2, {"state_dict_type": kind})
    model = fabric.setup(oracle.new_net())
    # for a full checkpoint, only the rank that writes knows the reason
    error = CheckpointExistsError if run.is_global_zero or kind == "sharded" else CheckpointError
    return [
        refusal(error, lambda: run.save_checkpoint(f"{tmp}/mine")),
        refusal(error, lambda: fabric.save(f"{tmp}/mine", {"model": model})),
    ]


class Tokenizer:
    """An object that is not plain data."""


class HoldsAnObject(Lit):
    """Saves an object as a hyper-parameter."""

    def __init__(self, tokenizer: Any, sizes: dict[str, int]) -> None:
        super().__init__()
        self.save_hyperparameters()


class DataHoldsAnObject(LightningDataModule):
    """Saves an object as a hyper-parameter."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(1, 1)


def _save_objects(strategy: str, tmp: str) -> list[str]:
    module, plain = HoldsAnObject(Tokenizer(), {"hidden": 3}), Lit()
    fabric = new_fabric(strategy, 1)
    net = oracle.new_net()
    state: dict[str, Any] = {"model": fabric.setup(net), "tokenizer": Tokenizer()}
    run, again = (new_trainer(tmp, strategy, enable_checkpointing=True) for _ in range(2))
    told = [
        refusal(CheckpointValueError, lambda: run.fit(module, loader(1, 1))),
        refusal(CheckpointValueError, lambda: again.fit(plain, datamodule=DataHoldsAnObject(Tokenizer()))),
        refusal(CheckpointValueError, lambda: fabric.save(f"{tmp}/saved", state)),
    ]
    assert not module.losses
    assert not plain.losses
    assert not list(Path(tmp).iterdir())
    return told


class BadCheckpointsOfAdaptersSuite(SavesOnce):
    """Trainer and Fabric raise the error on every rank, before they change anything."""

    @on_ranks("processes", "threads")  # a controller writes no file of rank 1
    @pytest.mark.parametrize("case", DAMAGE)
    def test_what_is_no_checkpoint(self, ranks: Ranks, tmp_path: Path, saved: SavedAt, case: str) -> None:
        """Loading a damaged or foreign file or folder must be refused on every rank, and change nothing."""
        path = tmp_path / "checkpoint"
        saved("trainer", "sharded", path)
        damage, words = DAMAGE[case]
        damage(path)
        for told in ranks.run(2, _load_damaged, self.strategy, str(tmp_path), str(path)):
            for message in told:
                assert_says(message, str(path), *words)

    @KINDS
    @pytest.mark.parametrize("module_class", [Renamed, Resized, MoreTrained, MoreGroups])
    def test_another_models_checkpoint_under_fabric(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit], kind: str
    ) -> None:
        """A checkpoint that doesn't match the module must be refused on every rank, and change nothing."""
        path = tmp_path / "checkpoint"
        saved("fabric", kind, path)
        for told in ranks.run(2, load_misfit, self.strategy, str(tmp_path), str(path), "fabric", module_class):
            assert_says(told, *MISFITS[module_class])
            if module_class is Renamed:
                assert_says(told, "strict=False")

    def test_new_param_groups_on_purpose(self, ranks: Ranks, tmp_path: Path, saved: SavedAt) -> None:
        """Param groups changed in ``on_train_start``, as the error suggests, must take effect after a resume."""
        saved("trainer", "sharded", tmp_path / "checkpoint")
        for changed, kept in ranks.run(2, _regrouped, self.strategy, str(tmp_path), str(tmp_path / "checkpoint")):
            assert len(kept) == 1, f"one parameter should be in the new group, which holds {kept}"
            told = f"{sorted(changed)} have changed, and the new group holds {kept}"
            assert set(kept) <= set(changed) <= {*kept, "net.out.weight"}, told  # tied to the first

    def test_fabric_checkpoint_without_a_key(self, ranks: Ranks, tmp_path: Path, saved: SavedAt) -> None:
        """``fabric.load`` with a key that was not saved must be refused; so must ``fit`` from Fabric's checkpoint."""
        saved("fabric", "sharded", tmp_path / "checkpoint")
        for told, trainer in ranks.run(2, _load_absent_key, self.strategy, str(tmp_path), str(tmp_path / "checkpoint")):
            assert_says(told, "no 'scheduler'", "'model', 'optimizer', 'step'", "strict=False")
            assert_says(trainer, "not saved by a Trainer", "no 'trainer'", "consolidate", "--to lightning")

    @KINDS
    def test_folder_of_something_else_is_not_replaced(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """A save must not replace a folder that is not a checkpoint."""
        mine = {"notes.txt": "mine", "manifest.json": json.dumps({"of": "another program"})}
        (tmp_path / "mine").mkdir()
        for name, text in mine.items():
            (tmp_path / "mine" / name).write_text(text)
        for told in ranks.run(2, _save_over_a_folder, self.strategy, str(tmp_path), kind):
            for message in told:
                assert_says(message, str(tmp_path / "mine"), "another path")
        assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == mine
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    def test_objects_are_refused_before_anything_is_trained_or_written(self, ranks: Ranks, tmp_path: Path) -> None:
        """Objects in hyper-parameters or state must be refused before training and before anything is written."""
        ((module, datamodule, fabric),) = ranks.run(1, _save_objects, self.strategy, str(tmp_path))
        found = f"{Tokenizer.__module__}.Tokenizer"
        assert_says(module, "hyper_parameters/tokenizer", found, "save_hyperparameters(ignore=['tokenizer'])")
        assert "sizes" not in module
        assert_says(datamodule, "datamodule_hyper_parameters/tokenizer", "save_hyperparameters(ignore=['tokenizer'])")
        assert_says(fabric, f"'tokenizer': {found}", "leave it out")
