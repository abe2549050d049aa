"""Checkpoints that can't be loaded or saved: refused with what to do next, and nothing is lost or half loaded."""

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
from torch.nn.functional import mse_loss

import oracle
from fsdp_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointValueError,
)
from fsdp_core.testing import RankPool
from fsdp_fsdp2 import FSDP2Strategy
from refusals import assert_says, assert_unchanged, copied_state, new_fabric, refusal
from runs import Lit, loader, trainer

KINDS = pytest.mark.parametrize("kind", ["sharded", "full"])


def save_with_trainer(tmp: str, path: str, kind: str) -> None:
    run = trainer(tmp, FSDP2Strategy(state_dict_type=kind), 2)
    run.fit(Lit("adamw_groups"), loader(1, 2))
    run.save_checkpoint(path)


def save_with_fabric(path: str, kind: str) -> None:
    fabric = new_fabric(2, state_dict_type=kind)
    lit = Lit("adamw_groups")
    model, optimizer = fabric.setup(lit, lit.configure_optimizers())
    x, y = oracle.global_batches(1)[0]
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Path], None]:
    """Puts a good checkpoint of ``Lit("adamw_groups")``, saved by a front end on two ranks, at a path."""
    made: dict[tuple[str, str], Path] = {}

    def put(front_end: str, kind: str, path: Path) -> None:
        if (front_end, kind) not in made:
            folder = tmp_path_factory.mktemp("saved")
            good = made[front_end, kind] = folder / "checkpoint"
            if front_end == "trainer":
                ranks.run(2, save_with_trainer, str(folder), str(good), kind)
            else:
                ranks.run(2, save_with_fabric, str(good), kind)
        good = made[front_end, kind]
        (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)

    return put


def refused_by_trainer(tmp: str, path: str, module: Lit, error: type[Exception], stage: str = "fit") -> str:
    before = copied_state(module)
    run = trainer(tmp, "fsdp2", 2)
    told = refusal(error, lambda: getattr(run, stage)(module, loader(1, 2), ckpt_path=path))
    assert not module.losses
    assert not module.validation_losses
    assert_unchanged(run.strategy, module, before)
    return told


def refused_by_fabric(path: str, module: Lit, error: type[Exception]) -> str:
    """The model, its optimizer and plain data at once, as users load them."""
    before = copied_state(module)
    fabric = new_fabric(2)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": -1}
    told = refusal(error, lambda: fabric.load(path, state))
    assert state["step"] == -1
    assert not optimizer.optimizer.state
    assert_unchanged(fabric.strategy, module, before)
    return told


# -- what is no checkpoint ---------------------------------------------------------------------------------------------


def replace_by_folder(**files: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.rmtree(path)
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)

    return replace


def replace_by_text(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("epoch,loss\n0,1.5\n")


def replace_by_pickle(path: Path) -> None:
    shutil.rmtree(path)
    torch.save({"state_dict": {}, "hyper_parameters": RankPool}, path)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: next(path.rglob(name)).unlink()


#: What is done to a good checkpoint, and what the refusal says.
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (shutil.rmtree, ["there is no checkpoint", "Check the path"]),
    "no manifest": (remove("manifest.json"), ["no complete checkpoint", "manifest.json", "Load an earlier checkpoint"]),
    "no part": (remove("*-rank-00001.*"), ["rank-00001.safetensors is missing", "load an earlier checkpoint"]),
    "foreign folder": (replace_by_folder(**{"notes.txt": ""}), ["not a checkpoint", "notes.txt", "Check the path"]),
    "folder of Lightning's": (
        replace_by_folder(**{".metadata": "", "__0_0.distcp": "", "meta.pt": ""}),
        ["not a checkpoint", ".metadata", "lightning.pytorch.utilities.consolidate_checkpoint"],
    ),
    "empty folder": (replace_by_folder(), ["no checkpoint", "empty", "Check the path"]),
    "text": (replace_by_text, ["is a file", "a sharded checkpoint is a folder", "Check the path"]),
    "pickle": (replace_by_pickle, ["can't be read", "RankPool", "add_safe_globals"]),
}


def load_damaged(tmp: str, path: str) -> list[str]:
    return [
        refused_by_trainer(tmp, path, Lit("adamw_groups"), CheckpointFormatError),
        refused_by_trainer(tmp, path, Lit("adamw_groups"), CheckpointFormatError, "validate"),
        refused_by_fabric(path, Lit("adamw_groups"), CheckpointFormatError),
    ]


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_no_checkpoint(ranks: RankPool, tmp_path: Path, saved: Any, case: str) -> None:
    path = tmp_path / "checkpoint"
    saved("trainer", "sharded", path)
    damage, words = DAMAGE[case]
    damage(path)
    for told in ranks.run(2, load_damaged, str(tmp_path), str(path)):
        for message in told:
            assert_says(message, str(path), *words)


# -- checkpoints of something else -------------------------------------------------------------------------------------


class Renamed(Lit):
    """A block less than the checkpoint has, and a layer more."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", blocks=2)
        self.extra = nn.Linear(3, 3)


class Resized(Lit):
    """Another head."""

    def __init__(self) -> None:
        super().__init__("adamw_groups")
        self.net.frozen = nn.Linear(oracle.FEATURES, oracle.FEATURES + 1)


class TwoOptimizers(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [oracle.sgd(self.net.blocks), oracle.sgd(self.net.frozen)]


class MoreTrained(Lit):
    """Trains a layer more than the checkpoint's optimizer did, from other weights."""

    def __init__(self) -> None:
        super().__init__("adamw_groups")
        self.net.frozen.requires_grad_(True)
        nn.init.ones_(self.net.inp.weight)


#: Into what the checkpoint is loaded, and what the refusal says.
MISFITS: dict[type[Lit], list[str]] = {
    Renamed: ["2 are missing in it:\n    extra.weight", "7 are in it alone:\n    net.blocks.2.gain", "nothing was"],
    Resized: [
        "2 differ:\n    net.frozen.weight: its shape is (6, 6) in the checkpoint, and (7, 6) here",
        "nothing was loaded",
    ],
    TwoOptimizers: ["the state of 1 optimizers", "made 2", "Return the optimizers"],
    MoreTrained: ["'net.frozen.weight'", "param group 0", "or load the weights alone"],
}


def load_misfit(tmp: str, path: str, front_end: str, module_class: type[Lit]) -> str:
    if front_end == "trainer":
        return refused_by_trainer(tmp, path, module_class(), CheckpointMismatchError)
    return refused_by_fabric(path, module_class(), CheckpointMismatchError)


@KINDS
@pytest.mark.parametrize("module_class", MISFITS)
def test_another_models_checkpoint_under_trainer(
    ranks: RankPool, tmp_path: Path, saved: Any, module_class: type[Lit], kind: str
) -> None:
    path = tmp_path / "checkpoint"
    saved("trainer", kind, path)
    for told in ranks.run(2, load_misfit, str(tmp_path), str(path), "trainer", module_class):
        assert_says(told, *MISFITS[module_class])
        if module_class is Renamed:
            assert_says(told, "strict_loading = False")  # the Trainer knows no strict=


@KINDS
@pytest.mark.parametrize("module_class", [Renamed, Resized, MoreTrained])
def test_another_models_checkpoint_under_fabric(
    ranks: RankPool, tmp_path: Path, saved: Any, module_class: type[Lit], kind: str
) -> None:
    path = tmp_path / "checkpoint"
    saved("fabric", kind, path)
    for told in ranks.run(2, load_misfit, str(tmp_path), str(path), "fabric", module_class):
        assert_says(told, *MISFITS[module_class])
        if module_class is Renamed:
            assert_says(told, "strict=False")


def load_absent_key(path: str) -> str:
    fabric = new_fabric(2)
    lit = Lit()
    nn.init.ones_(lit.net.inp.weight)
    before = copied_state(lit)
    model = fabric.setup(lit)
    told = refusal(CheckpointMismatchError, lambda: fabric.load(path, {"model": model, "scheduler": {}}))
    assert_unchanged(fabric.strategy, lit, before)
    return told


def test_fabric_checkpoint_without_a_key(ranks: RankPool, tmp_path: Path, saved: Any) -> None:
    saved("fabric", "sharded", tmp_path / "checkpoint")
    for told in ranks.run(2, load_absent_key, str(tmp_path / "checkpoint")):
        assert_says(told, "no 'scheduler'", "'model', 'optimizer', 'step'", "strict=False")


# -- what can't be saved -----------------------------------------------------------------------------------------------


def save_over_a_folder(tmp: str, kind: str) -> list[str]:
    run = trainer(tmp, FSDP2Strategy(state_dict_type=kind), 2)
    run.fit(Lit(), loader(1, 2))
    fabric = new_fabric(2, state_dict_type=kind)
    model = fabric.setup(oracle.new_net())
    # of a full file, only the rank that writes knows more than that it failed
    error = CheckpointExistsError if run.is_global_zero or kind == "sharded" else CheckpointError
    return [
        refusal(error, lambda: run.save_checkpoint(f"{tmp}/mine")),
        refusal(error, lambda: fabric.save(f"{tmp}/mine", {"model": model})),
    ]


@KINDS
def test_folder_of_something_else_is_not_replaced(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    mine = {"notes.txt": "mine", "manifest.json": json.dumps({"of": "another program"})}
    (tmp_path / "mine").mkdir()
    for name, text in mine.items():
        (tmp_path / "mine" / name).write_text(text)
    for told in ranks.run(2, save_over_a_folder, str(tmp_path), kind):
        for message in told:
            assert_says(message, str(tmp_path / "mine"), "another path")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == mine
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class Tokenizer:
    """No plain data."""


class HoldsAnObject(Lit):
    def __init__(self, tokenizer: Any, sizes: dict[str, int]) -> None:
        super().__init__()
        self.save_hyperparameters()


class DataHoldsAnObject(LightningDataModule):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(1, 1)


def save_objects(tmp: str) -> list[str]:
    module, plain = HoldsAnObject(Tokenizer(), {"hidden": 3}), Lit()
    fabric = new_fabric()
    net = oracle.new_net()
    state = {"model": fabric.setup(net), "tokenizer": Tokenizer()}
    run, again = (trainer(tmp, "fsdp2", enable_checkpointing=True) for _ in range(2))
    told = [
        refusal(CheckpointValueError, lambda: run.fit(module, loader(1, 1))),
        refusal(CheckpointValueError, lambda: again.fit(plain, datamodule=DataHoldsAnObject(Tokenizer()))),
        refusal(CheckpointValueError, lambda: fabric.save(f"{tmp}/saved", state)),
    ]
    assert not module.losses
    assert not plain.losses
    assert not list(Path(tmp).iterdir())
    return told


def test_objects_are_refused_before_anything_is_trained_or_written(ranks: RankPool, tmp_path: Path) -> None:
    ((module, datamodule, fabric),) = ranks.run(1, save_objects, str(tmp_path))
    assert_says(module, "hyper_parameters/tokenizer", "test_bad_checkpoints.Tokenizer")
    assert_says(module, "save_hyperparameters(ignore=['tokenizer'])")
    assert "sizes" not in module
    assert_says(datamodule, "datamodule_hyper_parameters/tokenizer", "save_hyperparameters(ignore=['tokenizer'])")
    assert_says(fabric, "'tokenizer': test_bad_checkpoints.Tokenizer", "leave it out")
