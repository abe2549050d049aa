"""Checkpoints under the Trainer: sharded and full, loaded and resumed on any world size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, requires
from fsdp_core.testing.training import Lit, loader, means, new_trainer

__all__ = ["CheckpointsSuite", "assert_bit_equal", "assert_continues", "loaded", "oracle_epochs", "two_epochs"]


def two_epochs(
    strategy: str,
    tmp: str,
    world_size: int,
    optimizer: str,
    save: str | None = None,
    resume: str | None = None,
    options: Mapping[str, Any] | None = None,
    max_epochs: int = 2,
) -> dict[str, Any]:
    """Fit epochs of two steps, optionally resuming or saving; return the losses, and the full state at the end."""
    module = Lit(optimizer)
    names = _spoil_buffers(module) if resume else set(module.state_dict())
    run = new_trainer(tmp, strategy, world_size, options, max_epochs=max_epochs)
    run.fit(module, loader(2, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    model = full_state(run.strategy)
    assert set(model) == names, "of what a module holds, a part is not in its state"
    return {
        "losses": means(module.losses),
        "model": model,
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }


def loaded(
    strategy: str, tmp: str, world_size: int, optimizer: str, path: Any, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state that a checkpoint of the first epoch restores, before any step."""
    module = Lit(optimizer)
    names = _spoil_buffers(module)
    run = new_trainer(tmp, strategy, world_size, options, max_epochs=1)
    run.fit(module, loader(2, world_size), ckpt_path=path)  # the epoch is complete: nothing is trained
    assert not module.losses
    model = full_state(run.strategy)
    assert set(model) == names, "of what a module holds, a part is not in its state"
    return {"model": model, "optimizer": full_optimizer_state(run.strategy, run.optimizers[0])}


def _spoil_buffers(module: torch.nn.Module) -> set[str]:
    """Zero all buffers, so that only a checkpoint can restore them; return the names in the module's state."""
    for buffer in module.buffers():
        buffer.zero_()
    return set(module.state_dict())


def oracle_epochs(optimizer: str) -> list[float]:
    """The losses of two epochs of two steps in one process."""
    loop = Loop(None, getattr(oracle, optimizer))
    losses, _ = loop.train(loop.batches(2) * 2)
    return losses


def assert_bit_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Assert that the states of model and optimizer are equal, bit for bit."""
    assert got["model"].keys() == want["model"].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor), name
    assert got["optimizer"].keys() == want["optimizer"].keys()
    for name, values in want["optimizer"].items():
        got_values = got["optimizer"][name]
        assert got_values.keys() == values.keys(), name
        for key, value in values.items():
            same = torch.equal(got_values[key], value) if isinstance(value, torch.Tensor) else got_values[key] == value
            assert same, (name, key)


def assert_continues(
    ranks: Ranks,
    tmp_path: Path,
    *,
    saver: str,
    reader: str,
    saved_on: int,
    loaded_on: tuple[int, ...],
    optimizer: str,
    kind: str = "sharded",
) -> None:
    """Assert that one strategy restores another's (or its own) checkpoint bit for bit, and resumes from it.

    Args:
        ranks: The ranks to run on.
        tmp_path: An empty folder.
        saver: The name of the strategy that trains the first epoch.
        reader: The name of the strategy that trains the second epoch.
        saved_on: The world size of the first epoch.
        loaded_on: World sizes to load on. The last one trains the second epoch.
        optimizer: The name of the oracle's function that builds the optimizer.
        kind: ``"sharded"`` or ``"full"``.
    """
    path = str(tmp_path / "checkpoint")
    tmp = str(tmp_path)
    options = {"state_dict_type": kind}
    first = ranks.run(saved_on, two_epochs, saver, tmp, saved_on, optimizer, path, None, options, 1)[0]
    assert Path(path).is_dir() == (kind == "sharded")
    for world_size in loaded_on:
        for got in ranks.run(world_size, loaded, reader, tmp, world_size, optimizer, path, options):
            assert_bit_equal(got, first)
    last = loaded_on[-1]
    for got in ranks.run(last, two_epochs, reader, tmp, last, optimizer, None, path, options):
        assert first["losses"] + got["losses"] == pytest.approx(oracle_epochs(optimizer), abs=FP32_TOLERANCE)


def _model_checkpoint(strategy: str, tmp: str, kind: str) -> dict[str, Any]:
    callback = ModelCheckpoint(
        dirpath=f"{tmp}/kept", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
    )
    module = Lit("sgd")
    loop: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 4}
    run = new_trainer(tmp, strategy, 2, {"state_dict_type": kind}, **loop)
    run.fit(module, loader(2, 2), loader(1, 2))
    names = sorted(p.name for p in Path(tmp, "kept").iterdir())
    assert callback.best_model_score is not None
    score = float(callback.best_model_score)
    best = run.validate(module, loader(1, 2), ckpt_path="best", verbose=False)[0]["val_loss"]
    run.fit_loop.max_epochs = 5
    run.fit(module, loader(2, 2), loader(1, 2), ckpt_path="last")
    return {"names": names, "best": best, "score": score, "epoch": run.current_epoch}


# The world size of the save, the kind of checkpoint, and the optimizer. Each pair of values occurs in some case.
_SHARDED = [
    (1, "sharded", "adamw_groups"),
    (2, "sharded", "momentum"),
    (3, "sharded", "sgd"),
    (3, "sharded", "adamw_groups"),
]
_FULL = [(1, "full", "momentum"), (2, "full", "sgd"), (3, "full", "adamw_groups")]


class CheckpointsSuite(Clauses):
    """The Trainer's checkpoints are restored bit for bit, and training continues as if uninterrupted."""

    @pytest.mark.parametrize(
        ("saved_on", "kind", "optimizer"),
        [
            *(pytest.param(*case, marks=requires(Capability.SHARDED_CHECKPOINT)) for case in _SHARDED),
            *(pytest.param(*case, marks=requires(Capability.FULL_CHECKPOINT)) for case in _FULL),
        ],
    )
    def test_saved_on_n_loaded_on_m(
        self, ranks: Ranks, tmp_path: Path, saved_on: int, kind: str, optimizer: str
    ) -> None:
        """A checkpoint must be restored bit for bit on any world size, and training must equal the oracle's."""
        assert_continues(
            ranks,
            tmp_path,
            saver=self.strategy,
            reader=self.strategy,
            saved_on=saved_on,
            loaded_on={1: (4, 2), 2: (1, 4, 2), 3: (1, 4, 2)}[saved_on],
            optimizer=optimizer,
            kind=kind,
        )

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_same_layout_goes_on_bit_for_bit(self, ranks: Ranks, tmp_path: Path) -> None:
        """On the same world size, a resumed run must equal the uninterrupted one bit for bit."""
        tmp, path = str(tmp_path), str(tmp_path / "checkpoint")
        whole = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups")[0]
        first = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups", path, None, None, 1)[0]
        second = ranks.run(2, two_epochs, self.strategy, tmp, 2, "adamw_groups", None, path)[0]
        assert first["losses"] + second["losses"] == whole["losses"]
        assert_bit_equal(second, whole)

    @KINDS
    def test_model_checkpoint(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """``ModelCheckpoint`` must keep the best checkpoints, and ``ckpt_path`` must accept ``best`` and ``last``."""
        for got in ranks.run(2, _model_checkpoint, self.strategy, str(tmp_path), kind):
            assert len(got["names"]) == 3, f"{got['names']} were kept, which should be 3"
            assert "last.ckpt" in got["names"]
            assert got["best"] == pytest.approx(got["score"], abs=FP32_TOLERANCE)
            assert got["epoch"] == 5, f"the resumed run ended in epoch {got['epoch']}, not 5"
