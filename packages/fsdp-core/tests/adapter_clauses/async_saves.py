"""Checkpoints written in the background: the same as synchronous ones, and no failure is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.checkpoint import compare, is_checkpoint, verify
from fsdp_core.errors import CheckpointError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.measuring.disks import disk
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import KINDS, Clauses, on_ranks
from fsdp_core.testing.suite.checkpoints.async_saves import ASYNC, AtStep, options_of
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, whole_batches
from fsdp_core.torch_private.process_groups import process_groups

__all__ = ["AsyncSavesSuite"]


class Watch(pl.Callback):
    """Checks before each step that complete checkpoints stay until newer ones are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Check the folder."""
        if not trainer.is_global_zero or not self.folder.is_dir():
            return
        there = [path for path in self.folder.iterdir() if "partial" not in path.name and path.name != "last.ckpt"]
        whole = sum(map(is_checkpoint, there))
        halves = [path.name for path in there if not is_checkpoint(path) and path.exists()]
        assert not halves, f"a search for checkpoints finds {halves}, which are not complete"
        assert whole >= min(self.seen, 2), (whole, self.seen)
        self.seen = max(self.seen, whole)
        last = self.folder / "last.ckpt"
        assert not os.path.lexists(last) or last.exists(), "the link is broken"
        assert not last.is_symlink() or is_checkpoint(last)


def _kept(strategy: str, tmp: str, asynchronous: bool, save_last: Any) -> dict[str, Any]:
    """Fit with two callbacks that keep checkpoints in one folder, on a slow disk."""
    folder = Path(tmp, "async" if asynchronous else "sync")
    every: dict[str, Any] = {"dirpath": folder, "every_n_train_steps": 1, "filename": "{step}"}
    best = ModelCheckpoint(**every, monitor="loss", save_top_k=2, save_last=save_last)
    newest = ModelCheckpoint(**every, monitor="step", mode="max", save_top_k=1)
    module = Lit("adamw_groups", dropout=0.2)
    run = new_trainer(
        tmp,
        strategy,
        2,
        {"async_save": asynchronous},
        callbacks=[best, newest, Watch(folder)],
        enable_checkpointing=True,
    )
    with oracle.seeded(5):
        pl.seed_everything(5, verbose=False)
    with disk(seconds=0.02):
        run.fit(module, loader(5, 2))
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        verify(folder / name)
    run.save_checkpoint(folder / "after")  # outside of fit(), the checkpoint is complete when the call returns
    verify(folder / "after")
    return {
        "names": names,
        "losses": means(module.losses),
        "groups": process_groups(),
        "linked": (folder / "last.ckpt").is_symlink(),
        "best": Path(best.best_model_path).name,
    }


def _resumed(strategy: str, tmp: str, path: str) -> dict[str, Any]:
    """Resume from a checkpoint; the losses, and the whole state at the end."""
    module = Lit("adamw_groups", dropout=0.2)
    run = new_trainer(tmp, strategy, 2, ASYNC, max_epochs=2, limit_train_batches=5)
    with oracle.seeded(6):
        pl.seed_everything(6, verbose=False)
    run.fit(module, loader(5, 2), ckpt_path=path)
    return {
        "losses": means(module.losses),
        "model": full_state(run.strategy),
        "optimizer": full_optimizer_state(run.strategy, run.optimizers[0]),
    }


def _stall(strategy: str, tmp: str, kind: str) -> tuple[int, bool, bool]:
    """Save to a disk that is blocked until the end of ``fit()`` waits for it.

    Returns:
        The steps that were taken while it was blocked, whether ``fit()`` waited, and whether it returned a whole save.
    """
    path, steps, waited = f"{tmp}/it", [0], [False]

    class Count(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            steps[0] += not used.opened.is_set()

    with disk(opened=False) as used:
        save = AtStep(1, lambda trainer: trainer.save_checkpoint(path))
        run = new_trainer(tmp, strategy, 2, options_of(kind, used), callbacks=[save, Count()])
        saves: Any = run.strategy.async_saves  # type: ignore[attr-defined]
        wait = saves.wait

        def open_and_wait() -> None:
            if steps[0] == 4:  # the save itself waits for earlier ones
                waited[0] = True
                run.strategy.barrier()  # ranks that are threads share the disk
                used.opened.set()
            wait()

        saves.wait = open_and_wait
        run.fit(Lit("momentum"), loader(4, 2))
        return steps[0], waited[0], is_checkpoint(path) if kind == "sharded" else os.path.isfile(path)


def _fails(strategy: str, tmp: str, kind: str, when: str) -> dict[str, Any]:
    """Fit on a disk that gets full before the second save, on one rank; then fit again with free space."""
    folder = Path(tmp, "kept")
    rank = rank_context().rank
    bad_rank = 0 if kind == "full" else 1
    module = Lit("momentum")

    def fill(trainer: pl.Trainer) -> None:
        trainer.strategy.wait_for_saves()  # type: ignore[attr-defined]
        used.room = 10 if rank == bad_rank else None

    def step(trainer: pl.Trainer) -> None:
        time.sleep(0.01 * (rank + 1))

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(folder / "mine.ckpt")

    kept: dict[str, Any] = {"dirpath": folder, "every_n_train_steps": 1, "monitor": "step"}
    callbacks: list[pl.Callback] = [ModelCheckpoint(**kept, mode="min", filename="first"), AtStep(2, fill)]
    if when == "save":
        callbacks.append(ModelCheckpoint(**kept, mode="max", filename="newest-{step}"))
    else:
        callbacks.append(AtStep(3, save))
    steps = 400 if when == "step" else 3
    callbacks += [AtStep(i, step) for i in range(4, steps)]
    with disk() as used:
        run = new_trainer(
            tmp, strategy, 2, options_of(kind, used), callbacks=callbacks, enable_checkpointing=True, max_steps=steps
        )
        with pytest.raises(CheckpointError) as error:
            run.fit(module, loader(steps, 2))
        used.room = None
        losses = len(module.losses)
        new_trainer(tmp, strategy, 2, options_of(kind, used)).fit(Lit("momentum"), loader(1, 2))
    return {"told": str(error.value), "losses": losses, "left": sorted(path.name for path in folder.iterdir())}


@contextmanager
def _interrupts_restored() -> Iterator[None]:
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # only the main thread has signal handlers
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the Trainer leaves interrupts ignored


def _exception(strategy: str, tmp: str, exception: type[BaseException], room: int | None) -> str:
    """Raise in a step while a save is pending; the notes of the exception."""
    path = f"{tmp}/it"

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(path)
        raise exception("in training")

    raised = SystemExit if exception is KeyboardInterrupt else exception
    with _interrupts_restored(), disk(seconds=0.1, room=room):
        run = new_trainer(tmp, strategy, 2, ASYNC, callbacks=[AtStep(1, save)])
        with pytest.raises(raised) as error:
            run.fit(Lit("momentum"), loader(3, 2))
    assert is_checkpoint(path) == (room is None)
    run.fit(Lit("momentum"), loader(1, 2))  # the strategy can be used again
    return "\n".join(getattr(error.value, "__notes__", []))


def _fabric_steps(strategy: str, tmp: str) -> dict[str, Any]:
    """Save during steps under Fabric, on a disk that gets full on rank 1; the error, and at which step it is raised."""
    fabric = new_fabric(strategy, 2, ASYNC)
    used: Any = fabric.strategy
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    told, at = "", -1
    with disk() as slow:
        fabric.save(f"{tmp}/one", {"model": model, "optimizer": optimizer})
        used.wait_for_saves()
        want = full_state(used)
        slow.room = 10 if fabric.global_rank == 1 else None
        fabric.save(f"{tmp}/one", {"model": model, "optimizer": optimizer, "more": 1})
        for step in range(1000):
            x, y = whole_batches(fabric, 1)[0]
            fabric.backward(mse_loss(model(x), y))
            try:
                optimizer.step()
            except CheckpointError as error:
                told, at = str(error), step
                break
            optimizer.zero_grad()
            time.sleep(0.005)
        slow.room = None
        optimizer.step()
        fabric.load(f"{tmp}/one", {"model": model, "optimizer": optimizer})
        got: dict[str, Tensor] = full_state(used)
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        fabric.save(f"{tmp}/two", {"model": model, "optimizer": optimizer})
        used.teardown()
    verify(f"{tmp}/two")
    return {"told": told, "at": at}


_WHEN = ("step", "save", "end")


class AsyncSavesSuite(Clauses):
    """With ``async_save=True``, checkpoints are the same, training continues meanwhile, and no failure is lost."""

    @pytest.mark.parametrize("save_last", [True, "link"])
    def test_callbacks_keep_what_they_keep_in_a_synchronous_run(
        self, ranks: Ranks, tmp_path: Path, save_last: Any
    ) -> None:
        """``ModelCheckpoint`` must keep the content of a synchronous run, and resuming must be the same."""
        tmp = str(tmp_path)
        want = ranks.run(2, _kept, self.strategy, tmp, False, save_last)
        got = ranks.run(2, _kept, self.strategy, tmp, True, save_last)
        assert got == want
        assert got[0]["linked"] == (save_last == "link")
        assert len(got[0]["names"]) >= 3, f"fewer than 3 checkpoints were kept: {got[0]['names']}"
        for name in got[0]["names"]:
            found = compare(tmp_path / "sync" / name, tmp_path / "async" / name)
            assert not found, f"{name} differs: {found}"
        for name in ("last.ckpt",) if save_last is True else (got[0]["best"],):
            first = ranks.run(2, _resumed, self.strategy, tmp, str(tmp_path / "sync" / name))
            second = ranks.run(2, _resumed, self.strategy, tmp, str(tmp_path / "async" / name))
            for one, other in zip(first, second, strict=True):
                assert one["losses"] == other["losses"]
                assert_bit_equal(other, one)

    @KINDS
    def test_training_goes_on_while_a_slow_disk_writes(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """Training must continue while a checkpoint is written, and ``fit()`` must wait for it at the end."""
        for steps, waited, whole in ranks.run(2, _stall, self.strategy, str(tmp_path), kind):
            assert steps == 4, f"{steps} of 4 steps were taken while the disk was blocked"
            assert waited, "fit() did not wait for the save"
            assert whole, "fit() returned before the checkpoint was complete"

    @on_ranks("processes")  # each with its own disk
    @pytest.mark.parametrize(
        ("kind", "when"), [*(pytest.param("sharded", when) for when in _WHEN), pytest.param("full", "step")]
    )
    def test_a_save_that_fails_ends_the_fit_on_every_rank(
        self, ranks: Ranks, tmp_path: Path, kind: str, when: str
    ) -> None:
        """A failed background save must end ``fit()`` at the same step on every rank, and keep older checkpoints."""
        first, second = ranks.run(2, _fails, self.strategy, str(tmp_path), kind, when)
        for got in (first, second):
            assert "in the background has failed" in got["told"]
            assert "No space left on device" in got["told"]
            # the checkpoint to be replaced by the failed one still exists
            assert got["left"] == ["first.ckpt", *(["newest-step=1.ckpt"] if when == "save" else [])]
        assert first["losses"] == second["losses"]
        if when == "step":
            assert 3 <= first["losses"] < 400, f"the fit ended after {first['losses']} steps, not after 3 to 399"

    @pytest.mark.parametrize(
        "exception",
        # Lightning handles interrupts in the main thread only
        [ZeroDivisionError, pytest.param(KeyboardInterrupt, marks=on_ranks("processes", "one controller"))],
    )
    def test_an_exception_lets_the_pending_save_finish(
        self, ranks: Ranks, tmp_path: Path, exception: type[BaseException]
    ) -> None:
        """After an exception in a step, the pending save must be completed."""
        for notes in ranks.run(2, _exception, self.strategy, str(tmp_path), exception, None):
            assert notes == ""

    def test_an_exception_takes_the_failure_with_it(self, ranks: Ranks, tmp_path: Path) -> None:
        """An exception in a step must carry the error of a pending save that failed, as a note."""
        for notes in ranks.run(2, _exception, self.strategy, str(tmp_path), ZeroDivisionError, 10):
            assert "No space left on device" in notes

    @on_ranks("processes")  # each with its own disk
    def test_fabric_tells_a_failure_at_one_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """Under Fabric, a failed background save must raise at the same step on every rank."""
        first, second = ranks.run(2, _fabric_steps, self.strategy, str(tmp_path))
        assert first == second
        assert "No space left on device" in first["told"]
