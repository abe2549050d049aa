"""The global batch on another number of ranks, and which of several checkpoints is the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from fsdp_core.checkpoint import save
from fsdp_core.errors import ShardingError
from fsdp_core.lightning import GlobalBatch, micro_batches
from fsdp_core.lightning.checkpoints.attempts import find_newest
from fsdp_core.runtime import ProcessGroupRuntime
from quiet_trainer import quiet_trainer


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: micro_batches(0, per_rank=1, ranks=1), "size=0 is not a number"),
        (lambda: micro_batches(8, per_rank=True, ranks=1), "per_rank=True is not a number"),
        (lambda: micro_batches(8, per_rank=8, ranks=2), "Write 16, another number of samples per rank, or start"),
        (lambda: GlobalBatch(8), r"Write GlobalBatch\(8, per_rank=...\)"),
        (lambda: GlobalBatch("kept"), "size='kept' is not a number"),  # type: ignore[arg-type]
    ],
)
def test_sizes_that_cant_be(make: Any, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        make()


class Manual(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("callbacks", "given", "module", "told"),
    [
        (
            [GlobalBatch(4, per_rank=1)],
            {"accumulate_grad_batches": 2},
            BoringModel,
            "also has accumulate_grad_batches=2",
        ),
        (
            [GlobalBatch(4, per_rank=1), GradientAccumulationScheduler({0: 2})],
            {},
            BoringModel,
            "also has GradientAccumulationScheduler",
        ),
        ([GlobalBatch(4, per_rank=2)], {}, BoringModel, "whose batches have 1 samples"),
        ([GlobalBatch(4, per_rank=1)], {}, Manual, "can't accumulate in manual optimization"),
    ],
)
def test_trainers_that_contradict_the_global_batch(
    tmp_path: Path, callbacks: Any, given: Any, module: Any, told: str
) -> None:
    trainer = quiet_trainer(**given, callbacks=callbacks, default_root_dir=tmp_path, max_steps=1)
    with pytest.raises(ShardingError, match=told):
        trainer.fit(module())


def test_it_accumulates_under_any_strategy(tmp_path: Path) -> None:
    trainer = quiet_trainer(callbacks=[GlobalBatch(4, per_rank=1)], default_root_dir=tmp_path, max_steps=2)
    trainer.fit(BoringModel())
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, 2)
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 8


def saved(path: Path, attempts: list[str], step: int, seconds: int) -> str:
    """A checkpoint as a Trainer's, which a clock says was saved then."""
    state = {"trainer": {"global_step": step, "fsdp_core": {"attempts": [{"id": one} for one in attempts]}}}
    save(path, state, runtime=ProcessGroupRuntime(), strategy="test", kinds={})
    os.utime(path, (seconds, seconds))
    return str(path)


def test_the_newest_follows_from_what_led_to_it_and_not_from_a_clock(tmp_path: Path) -> None:
    early = saved(tmp_path / "a", ["1"], 8, seconds=900)
    later = saved(tmp_path / "b", ["1"], 10, seconds=800)
    after = saved(tmp_path / "c", ["1", "2"], 9, seconds=700)  # which began from the step 8
    other = saved(tmp_path / "d", ["3"], 1, seconds=1000)
    assert (find_newest([early, later]), find_newest([early, later, after])) == (later, after)
    assert find_newest([early, other]) is None  # of another run: nothing but a clock can tell
    assert find_newest([early, str(tmp_path)]) is None


def test_last_is_the_newest_wherever_it_was_saved(tmp_path: Path) -> None:
    last = saved(tmp_path / "often/last.ckpt", ["1"], 8, seconds=900)
    callbacks = [ModelCheckpoint(tmp_path / "often"), OnExceptionCheckpoint(tmp_path / "exception")]
    trainer = quiet_trainer(callbacks=callbacks, default_root_dir=tmp_path)

    def chosen() -> Any:
        select = trainer._checkpoint_connector._select_ckpt_path
        return select(trainer.state.fn, "last", model_provided=True, model_connected=False)

    trainer.state.fn = pl.trainer.states.TrainerFn.FITTING
    assert chosen() == last
    hpc = saved(tmp_path / "hpc_ckpt_1.ckpt", ["1"], 9, seconds=500)
    assert chosen() == hpc
    exception = saved(tmp_path / "exception/on_exception.ckpt", ["1", "2"], 9, seconds=100)
    assert chosen() == exception
    saved(tmp_path / "hpc_ckpt_2.ckpt", ["of another run"], 500, seconds=2000)
    assert chosen() == exception, "what signals leave lies in one folder for all runs that are started there"
