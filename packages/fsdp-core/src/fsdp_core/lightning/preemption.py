"""Ends a fit after a checkpoint, at the same batch on all ranks, when a signal has told any one of them to end.

Lightning saves inside its signal handler, at an arbitrary point of one rank, and broadcasts there. Here a handler sets
a flag and nothing else. A rank with the flag writes it to the store of the process group before its next batch; rank 0
looks there, and tells all ranks by the broadcast that Lightning makes before each batch, so it costs no further
collective.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from fsdp_core.lightning.global_batch import keeps_global_batch
from fsdp_core.lightning.private import (
    before_each_batch,
    instead_of_signal_handlers,
    is_accumulating,
    note_sigterm,
    path_to_resume_from,
)
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.torch_private import default_store

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer import ShardedTrainerStrategy

__all__ = ["Preemption"]

#: Seconds between two looks of rank 0 at the store, where the other ranks write that they were told to end.
_EVERY = 0.5

#: Where they write it. Rank 0 removes it before each fit: a store may outlive one.
_KEY = "fsdp_core/told_to_end"


class Preemption:
    """The signals that end the fits of one strategy: SIGTERM and, under SLURM, the one that asks for a requeue.

    Args:
        strategy: The strategy. Nothing is done for ranks that are threads: only the main thread gets signals.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self._told: int | None = None
        self._agreed = 0
        self._passed_on = self._ended = False
        self._looked = 0.0

    def follow(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        """Take over the signals of a stage, which Lightning is about to register. All ranks must call it."""
        is_process = isinstance(self._strategy.runtime, ProcessGroupRuntime)
        if not is_process or threading.current_thread() is not threading.main_thread():
            return
        self._told, self._agreed, self._passed_on, self._ended, self._looked = None, 0, False, False, 0.0
        store = default_store()
        if store is not None and self._strategy.runtime.rank == 0:
            store.delete_key(_KEY)  # the others write there after the barrier at the end of the set-up
        instead_of_signal_handlers(trainer, lambda: self._register(fitting))
        if fitting:
            before_each_batch(trainer, lambda: self._end_together(trainer))

    def finish(self) -> None:
        """Warn of a signal that came during the last batch of a fit, which has ended as it would have without it."""
        if self._told is not None and not self._ended:
            warnings.warn(
                f"{self._strategy.strategy_name}: {signal.Signals(self._told).name} came during the last batch, and "
                "the fit has ended as planned. Send it again to end what the script does next.",
                stacklevel=2,
            )
        self._told = None

    def _register(self, fitting: bool) -> None:
        """Handle the signals, after the handlers that were there before Lightning's were noted for later."""
        for signum in filter(None, (signal.SIGTERM, self._requeue_signal())):
            before = signal.getsignal(signum)
            if signum == signal.SIGTERM or before in (signal.SIG_DFL, None):
                signal.signal(signum, self._handler(before if callable(before) else None, fitting))

    def _requeue_signal(self) -> int | None:
        """The signal by which SLURM announces the end of a job that is to be queued again; ``None`` elsewhere."""
        environment = self._strategy.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return None
        return environment.requeue_signal or signal.SIGUSR1

    def _handler(self, before: Callable[..., Any] | None, fitting: bool) -> Callable[[int, FrameType | None], None]:
        def note(signum: int, frame: FrameType | None) -> None:
            self._told = signum
            if before is not None:  # the user's own
                before(signum, frame)
            if not fitting:  # there is nothing to save
                self._ended = True
                raise SIGTERMException(128 + signum)

        return note

    def _end_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks, after a checkpoint, if any of them was told to end. Called before each batch.

        With a global batch that is kept, a step that is begun is done first: what is left of it may not be divisible
        over other ranks.
        """
        told = self._agreed or self._told or 0
        if self._strategy.runtime.world_size > 1 and not self._agreed:
            told = self._told_to_any(told)
        self._agreed = told  # by all ranks
        if told and not (keeps_global_batch(trainer) and is_accumulating(trainer)):
            self._ended = True
            note_sigterm(trainer)
            self._save(trainer, told)
            # one status tells a launcher; a process of Lightning's that ended with it would have the others killed
            raise SIGTERMException(128 + told if self._strategy.is_global_zero else 0)

    def _told_to_any(self, told: int) -> int:
        store, runtime = default_store(), self._strategy.runtime
        if runtime.rank == 0:
            if not told and time.monotonic() - self._looked > _EVERY:
                self._looked = time.monotonic()
                told = int(store.get(_KEY)) if store.check([_KEY]) else 0
        elif told and not self._passed_on:
            self._passed_on = True
            store.set(_KEY, str(told))
        return int(runtime.broadcast(torch.tensor([told], device=runtime.device)))

    def _save(self, trainer: pl.Trainer, told: int) -> None:
        strategy, name = self._strategy, signal.Signals(told).name
        requeues = told == self._requeue_signal()
        if not requeues and not trainer.checkpoint_callbacks:
            rank_zero_warn(
                f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}, and nothing is "
                "saved: the Trainer has no checkpoint callback. Leave enable_checkpointing=False out to have one."
            )
            return
        if not requeues and any(_saves_on_exception(one) for one in trainer.checkpoint_callbacks):
            rank_zero_info(f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}.")
            return
        path = strategy.broadcast(path_to_resume_from(trainer))
        trainer.save_checkpoint(path)
        strategy.wait_for_saves()
        rank_zero_info(
            f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}, which {path} holds. "
            "Resume it with trainer.fit(module, ckpt_path='hpc')."
        )
        if requeues and strategy.is_global_zero:
            _requeue()


def _saves_on_exception(callback: object) -> bool:
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and bool(getattr(callback, "save_on_exception", False))
    )


def _requeue() -> None:
    """Let SLURM queue this job again, once its checkpoint is complete."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None else os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        failure = done.stderr.strip() or f"it ended with {done.returncode}" if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        rank_zero_warn(
            f"`scontrol requeue {job}` has failed: {failure}\nThe checkpoint is complete: submit the job again, with "
            "the same default_root_dir, and it goes on from there."
        )
    else:
        rank_zero_info(f"SLURM job {job} is queued again.")
