"""Checkpoints that can't be loaded or saved: the error says what to do, and nothing is lost or half loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.refusals import assert_says, assert_unchanged, refusal, was_refused
from fsdp_core.testing.state import copied_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, requires
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = [
    "MISFITS",
    "BadCheckpointsSuite",
    "SavedAt",
    "SavesOnce",
    "load_misfit",
    "new_lit",
    "refused_by_fabric",
    "refused_by_trainer",
]

SavedAt = Callable[[str, str, Path], None]


#: Large enough that every rank holds elements of a parameter, even if shards are padded.
WIDTH = 50


def new_lit(**net: Any) -> Lit:
    """A module like the one that valid checkpoints are saved from."""
    return Lit("adamw_groups", width=WIDTH, **net)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer with the same values on every rank, even if ranks share a random generator."""
    linear = nn.Linear(inputs, outputs)
    nn.init.constant_(linear.weight, 0.5)
    nn.init.constant_(linear.bias, 0.25)
    return linear


class Keeper(Callback):
    """A callback with state, which records whether it was restored."""

    def __init__(self) -> None:
        self.seen = 7
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "best": torch.tensor(0.5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = True


def _save_with_trainer(strategy: str, tmp: str, path: str, kind: str) -> None:
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind}, callbacks=[Keeper()])
    run.fit(new_lit(), loader(1, 2))
    run.save_checkpoint(path)


def _save_with_fabric(strategy: str, path: str, kind: str) -> None:
    fabric = new_fabric(strategy, 2, {"state_dict_type": kind})
    lit = new_lit()
    model, optimizer = fabric.setup(lit, lit.configure_optimizers())
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})


def refused_by_trainer(
    strategy: str, tmp: str, path: str, module: Lit, error: type[Exception], stage: str = "fit"
) -> str:
    """The error of a stage from a checkpoint, which must leave everything as it was."""
    state_before = copied_state(module)
    keeper = Keeper()
    run = new_trainer(tmp, strategy, 2, callbacks=[keeper])
    message = refusal(error, lambda: getattr(run, stage)(module, loader(1, 2), ckpt_path=path))
    assert was_refused(message), message
    assert not module.losses
    assert not module.validation_losses
    assert not any(optimizer.state for optimizer in run.optimizers)
    assert run.global_step == run.current_epoch == 0, f"step {run.global_step}, epoch {run.current_epoch}"
    assert not keeper.restored
    assert_unchanged(run.strategy, state_before)
    return message


def refused_by_fabric(
    strategy: str, path: str, module: Lit, error: type[Exception], weights_alone: bool = False
) -> str:
    """Load the model, its optimizer unless its weights alone are loaded, and plain data together; the error."""
    state_before = copied_state(module)
    fabric = new_fabric(strategy)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state: dict[str, Any] = {"model": model, "step": -1} | ({} if weights_alone else {"optimizer": optimizer})
    message = refusal(error, lambda: fabric.load(path, state))
    assert was_refused(message), message
    assert state["step"] == -1, f"the step became {state['step']} though the checkpoint was refused"
    assert not optimizer.optimizer.state
    assert_unchanged(fabric.strategy, state_before)
    return message


# -- checkpoints that don't match --------------------------------------------------------------------------------------


class Renamed(Lit):
    """Has one block less than the checkpoint, and an additional layer."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=WIDTH, blocks=2)
        self.extra = _linear(3, 3)


class Resized(Lit):
    """Has a head of another size."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=WIDTH)
        self.net.frozen = _linear(oracle.FEATURES, oracle.FEATURES + 1)


class TwoOptimizers(Lit):
    """Has two optimizers, under manual optimization."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [oracle.sgd(self.net.blocks), oracle.sgd(self.net.frozen)]


class MoreTrained(Lit):
    """Trains a layer that was frozen in the checkpoint, from other weights."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=WIDTH)
        self.net.frozen.requires_grad_(True)
        nn.init.ones_(self.net.inp.weight)


class MoreGroups(Lit):
    """Has an own param group for a block that shared a group in the checkpoint."""

    def __init__(self) -> None:
        super().__init__("adamw_groups", width=WIDTH)

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


#: Modules that don't match the checkpoint, with parts of the error.
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


def load_misfit(strategy: str, tmp: str, path: str, front_end: str, module_class: Callable[[], Lit]) -> str:
    """The error of a load into a module that does not match the checkpoint."""
    if front_end == "trainer":
        return refused_by_trainer(strategy, tmp, path, module_class(), CheckpointMismatchError)
    return refused_by_fabric(strategy, path, module_class(), CheckpointMismatchError)


def _load_misfit_weights(strategy: str, path: str, module_class: Callable[[], Lit]) -> str:
    return refused_by_fabric(strategy, path, module_class(), CheckpointMismatchError, weights_alone=True)


class SavesOnce(Clauses):
    """Saves one checkpoint per kind and front end for all tests of a class; each test damages or loads a copy."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> SavedAt:
        """A function that copies a valid checkpoint of ``Lit("adamw_groups")``, saved on two ranks, to a path."""
        saved_paths: dict[tuple[str, str], Path] = {}

        def put(front_end: str, kind: str, path: Path) -> None:
            if (front_end, kind) not in saved_paths:
                folder = tmp_path_factory.mktemp("saved")
                good = saved_paths[front_end, kind] = folder / "checkpoint"
                if front_end == "trainer":
                    ranks.run(2, _save_with_trainer, cls.strategy, str(folder), str(good), kind)
                else:
                    ranks.run(2, _save_with_fabric, cls.strategy, str(good), kind)
            good = saved_paths[front_end, kind]
            (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)

        return put


class BadCheckpointsSuite(SavesOnce):
    """Trainer and Fabric raise the error on every rank, before they change anything."""

    @KINDS
    @pytest.mark.parametrize(
        "module_class",
        [
            pytest.param(cls, marks=requires(Capability.MANUAL_OPTIMIZATION) if cls is TwoOptimizers else [])
            for cls in MISFITS
        ],
    )
    def test_another_models_checkpoint_under_trainer(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit], kind: str
    ) -> None:
        """A checkpoint that doesn't match the module must be refused on every rank, and change nothing."""
        path = tmp_path / "checkpoint"
        saved("trainer", kind, path)
        for message in ranks.run(2, load_misfit, self.strategy, str(tmp_path), str(path), "trainer", module_class):
            assert_says(message, *MISFITS[module_class])
            if module_class is Renamed:
                assert_says(message, "strict_loading = False")  # the Trainer has no argument strict=

    @requires(Capability.SHARDED_CHECKPOINT)
    @pytest.mark.parametrize("module_class", [Renamed, Resized])
    def test_another_models_weights_without_an_optimizer(
        self, ranks: Ranks, tmp_path: Path, saved: SavedAt, module_class: type[Lit]
    ) -> None:
        """Weights that don't match must be refused also without an optimizer, whose names would not match either."""
        path = tmp_path / "checkpoint"
        saved("fabric", "sharded", path)
        for message in ranks.run(2, _load_misfit_weights, self.strategy, str(path), module_class):
            assert_says(message, *MISFITS[module_class])
