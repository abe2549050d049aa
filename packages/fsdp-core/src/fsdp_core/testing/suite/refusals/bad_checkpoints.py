"""Checkpoints that can't be loaded or saved: the error says what to do, and nothing is lost or half loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointValueError,
)
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.refusals import assert_says, assert_unchanged, refusal, was_refused
from fsdp_core.testing.state import copied_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, on_ranks, requires
from fsdp_core.testing.suite.refusals.corruption import DAMAGE, OF_RANK_ONE
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["BadCheckpointsSuite"]

SavedAt = Callable[[str, str, Path], None]


#: Large enough that every rank holds elements of a parameter, even if shards are padded.
_WIDTH = 50


def _lit(**net: Any) -> Lit:
    return Lit("adamw_groups", width=_WIDTH, **net)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer with the same values on every rank, even if ranks share a random generator."""
    linear = nn.Linear(inputs, outputs)
    nn.init.constant_(linear.weight, 0.5)
    nn.init.constant_(linear.bias, 0.25)
    return linear


class Keeper(Callback):
    """Has state, and records whether it was restored."""

    def __init__(self) -> None:
        self.seen, self.restored = 7, False

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "best": torch.tensor(0.5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = True


def _save_with_trainer(strategy: str, tmp: str, path: str, kind: str) -> None:
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind}, callbacks=[Keeper()])
    run.fit(_lit(), loader(1, 2))
    run.save_checkpoint(path)


def _save_with_fabric(strategy: str, path: str, kind: str) -> None:
    fabric = new_fabric(strategy, 2, {"state_dict_type": kind})
    lit = _lit()
    model, optimizer = fabric.setup(lit, lit.configure_optimizers())
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})


def _refused_by_trainer(
    strategy: str, tmp: str, path: str, module: Lit, error: type[Exception], stage: str = "fit"
) -> str:
    before, keeper = copied_state(module), Keeper()
    run = new_trainer(tmp, strategy, 2, callbacks=[keeper])
    told = refusal(error, lambda: getattr(run, stage)(module, loader(1, 2), ckpt_path=path))
    assert was_refused(told), told
    assert not module.losses
    assert not module.validation_losses
    assert not any(optimizer.state for optimizer in run.optimizers)
    assert run.global_step == run.current_epoch == 0, f"step {run.global_step}, epoch {run.current_epoch}"
    assert not keeper.restored
    assert_unchanged(run.strategy, before)
    return told


def _refused_by_fabric(
    strategy: str, path: str, module: Lit, error: type[Exception], weights_alone: bool = False
) -> str:
    """Load the model, its optimizer unless its weights alone are loaded, and plain data together; the error."""
    before = copied_state(module)
    fabric = new_fabric(strategy)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state: dict[str, Any] = {"model": model, "step": -1} | ({} if weights_alone else {"optimizer": optimizer})
    told = refusal(error, lambda: fabric.load(path, state))
    assert was_refused(told), told
    assert state["step"] == -1, f"the step became {state['step']} though the checkpoint was refused"
    assert not optimizer.optimizer.state
    assert_unchanged(fabric.strategy, before)
    return told


# -- damaged checkpoints -----------------------------------------------------------------------------------------------


def _load_damaged(strategy: str, tmp: str, path: str) -> list[str]:
    return [
        _refused_by_trainer(strategy, tmp, path, _lit(), CheckpointFormatError),
        _refused_by_trainer(strategy, tmp, path, _lit(), CheckpointFormatError, "validate"),
        _refused_by_fabric(strategy, path, _lit(), CheckpointFormatError),
    ]


# -- checkpoints that don't match --------------------------------------------------------------------------------------


class Renamed(Lit):
    """Has a block less than the checkpoint, and an additional layer."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=_WIDTH, blocks=2)
        self.extra = _linear(3, 3)


class Resized(Lit):
    """Has a head of another size."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=_WIDTH)
        self.net.frozen = _linear(oracle.FEATURES, oracle.FEATURES + 1)


class TwoOptimizers(Lit):
    """Has two optimizers, under manual optimization."""

    def __init__(self) -> None:
        super().__init__(width=_WIDTH)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [oracle.sgd(self.net.blocks), oracle.sgd(self.net.frozen)]


class MoreTrained(Lit):
    """Trains a layer that was frozen in the checkpoint, from other weights."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=_WIDTH)
        self.net.frozen.requires_grad_(True)
        nn.init.ones_(self.net.inp.weight)


class MoreGroups(Lit):
    """Has an own param group for a block that shared a group in the checkpoint."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=_WIDTH)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        first, second = (group["params"] for group in optimizer.param_groups)
        own = {id(p) for p in self.net.blocks[1].parameters()}
        return torch.optim.AdamW(
            [
                {"params": [p for p in first if id(p) not in own], "weight_decay": 0.1},
                {"params": second, "weight_decay": 0.0},
                {"params": [p for p in first if id(p) in own], "weight_decay": 0.5, "lr": 0.125},
            ],
            lr=0.01,
            eps=1e-3,
        )


class RegroupsLater(Lit):
    """Builds the saved param groups, and changes them after they are loaded: only one parameter is trained further."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=_WIDTH)

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers()
        for group in list(optimizer.param_groups):
            group["params"], others = group["params"][:1], group["params"][1:]
            optimizer.add_param_group({"params": others, "lr": 0.0})
        optimizer.param_groups[1]["lr"] = 0.0


#: Modules into which the checkpoint is loaded, and parts of the error.
MISFITS: dict[type[Lit], list[str]] = {
    Renamed: ["2 are missing in it:\n    extra.weight", "7 are only in it:\n    net.blocks.2.gain", "nothing was"],
    Resized: [
        "2 differ:\n    net.frozen.weight: its shape is (6, 6) in the checkpoint, and (7, 6) here",
        "nothing was loaded",
    ],
    TwoOptimizers: ["the state of 1 optimizers", "returned 2", "Return the optimizers"],
    MoreGroups: [
        "param groups 0 and 2 of the optimizer were saved as one, param group 0 of 2",
        "'net.blocks.1.up.weight'",
        "lr 0.01 instead of 0.125",
        "weight_decay 0.1 instead of 0.5",
        "on_train_start or after fabric.load",
    ],
    MoreTrained: ["'net.frozen.weight'", "param group 0", "or load only the weights"],
}


def _load_misfit(strategy: str, tmp: str, path: str, front_end: str, module_class: Callable[[], Lit]) -> str:
    if front_end == "trainer":
        return _refused_by_trainer(strategy, tmp, path, module_class(), CheckpointMismatchError)
    return _refused_by_fabric(strategy, path, module_class(), CheckpointMismatchError)


def _load_misfit_weights(strategy: str, path: str, module_class: Callable[[], Lit]) -> str:
    return _refused_by_fabric(strategy, path, module_class(), CheckpointMismatchError, weights_alone=True)


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
    return told, _refused_by_trainer(strategy, tmp, path, Lit(), KeyError)


# -- objects that can't be saved ---------------------------------------------------------------------------------------


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


class BadCheckpointsSuite(Clauses):
    """Trainer and Fabric raise the error on every rank, before they change anything."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> SavedAt:
        """A function that copies a valid checkpoint of ``Lit("adamw_groups")``, saved on two ranks, to a path."""
        made: dict[tuple[str, str], Path] = {}

        def put(front_end: str, kind: str, path: Path) -> None:
            if (front_end, kind) not in made:
                folder = tmp_path_factory.mktemp("saved")
                good = made[front_end, kind] = folder / "checkpoint"
                if front_end == "trainer":
                    ranks.run(2, _save_with_trainer, cls.strategy, str(folder), str(good), kind)
                else:
                    ranks.run(2, _save_with_fabric, cls.strategy, str(good), kind)
            good = made[front_end, kind]
            (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)

        return put

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize(
        "case",
        [pytest.param(one, marks=on_ranks("processes", "threads") if one in OF_RANK_ONE else []) for one in DAMAGE],
    )
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
    @pytest.mark.parametrize(
        "module_class",
        [
            pytest.param(one, marks=requires(Capability.MANUAL_OPTIMIZATION) if one is TwoOptimizers else [])
            for one in MISFITS
        ],
    )
    def test_another_models_checkpoint_under_trainer(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit], kind: str
    ) -> None:
        """A checkpoint that doesn't match the module must be refused on every rank, and change nothing."""
        path = tmp_path / "checkpoint"
        saved("trainer", kind, path)
        for told in ranks.run(2, _load_misfit, self.strategy, str(tmp_path), str(path), "trainer", module_class):
            assert_says(told, *MISFITS[module_class])
            if module_class is Renamed:
                assert_says(told, "strict_loading = False")  # the Trainer has no argument strict=

    @KINDS
    @pytest.mark.parametrize("module_class", [Renamed, Resized, MoreTrained, MoreGroups])
    def test_another_models_checkpoint_under_fabric(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit], kind: str
    ) -> None:
        """A checkpoint that doesn't match the module must be refused on every rank, and change nothing."""
        path = tmp_path / "checkpoint"
        saved("fabric", kind, path)
        for told in ranks.run(2, _load_misfit, self.strategy, str(tmp_path), str(path), "fabric", module_class):
            assert_says(told, *MISFITS[module_class])
            if module_class is Renamed:
                assert_says(told, "strict=False")

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("module_class", [Renamed, Resized])
    def test_another_models_weights_without_an_optimizer(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit]
    ) -> None:
        """Weights that don't match must be refused where no optimizer is loaded with them, whose names would tell."""
        path = tmp_path / "checkpoint"
        saved("fabric", "sharded", path)
        for told in ranks.run(2, _load_misfit_weights, self.strategy, str(path), module_class):
            assert_says(told, *MISFITS[module_class])

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_new_param_groups_on_purpose(self, ranks: Ranks, tmp_path: Path, saved: SavedAt) -> None:
        """Param groups changed in ``on_train_start``, as the error suggests, must take effect after a resume."""
        saved("trainer", "sharded", tmp_path / "checkpoint")
        for changed, kept in ranks.run(2, _regrouped, self.strategy, str(tmp_path), str(tmp_path / "checkpoint")):
            assert len(kept) == 1, f"one parameter should be in the new group, which holds {kept}"
            told = f"{sorted(changed)} have changed, and the new group holds {kept}"
            assert set(kept) <= set(changed) <= {*kept, "net.out.weight"}, told  # tied to the first

    @requires(Capability.SHARDED_CHECKPOINT)
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

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_objects_are_refused_before_anything_is_trained_or_written(self, ranks: Ranks, tmp_path: Path) -> None:
        """Objects in hyper-parameters or state must be refused before training and before anything is written."""
        ((module, datamodule, fabric),) = ranks.run(1, _save_objects, self.strategy, str(tmp_path))
        found = f"{Tokenizer.__module__}.Tokenizer"
        assert_says(module, "hyper_parameters/tokenizer", found, "save_hyperparameters(ignore=['tokenizer'])")
        assert "sizes" not in module
        assert_says(datamodule, "datamodule_hyper_parameters/tokenizer", "save_hyperparameters(ignore=['tokenizer'])")
        assert_says(fabric, f"'tokenizer': {found}", "leave it out")
