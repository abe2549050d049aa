"""The private names of Lightning that this package uses, each with its reason. Checked on Lightning 2.6.6."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# What a strategy's launcher must be; Lightning offers no public class for it.
from lightning.fabric.strategies.launchers.launcher import _Launcher as Launcher

# Fabric asks for a launcher of this class before it says that launch() needs a function.
from lightning.fabric.strategies.launchers.xla import _XLALauncher as LaunchesXLA

# What ranks wait at in rank_zero_first() and prepare_data(). Lightning's meets by torch.distributed or not at all.
from lightning.fabric.utilities.distributed import _InfiniteBarrier as InfiniteBarrier

# The Trainer's loops, and the counters in them; a Trainer has no other place for how far it has come.
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _BaseProgress as BaseProgress

# Tells callbacks, data module, strategy and loggers of an error. Lightning does so only where the ranks were started.
from lightning.pytorch.trainer import call

# Keeps what is logged; no public hook of a strategy sees the values before something is computed with them.
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector

# What it keeps of each value, and where.
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric

# How a tuner ends the fit in which it tries its values; no error.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

__all__ = [
    "BaseProgress",
    "Launcher",
    "LaunchesXLA",
    "LoggerConnector",
    "Loop",
    "ResultCollection",
    "ResultMetric",
    "TunerExit",
    "interrupt",
    "mark_as_told",
    "meet_at_infinite_barriers",
]

_TOLD = "_fsdp_xla_told_in_its_rank"

#: Tells a Trainer's callbacks, data module, strategy and loggers of an error.
interrupt = call._interrupt


def mark_as_told(error: BaseException) -> None:
    """Let Lightning not tell of an error where the ranks were started: it has been told in the ranks."""
    setattr(error, _TOLD, True)
    call._interrupt = _interrupt_unless_told  # type: ignore[assignment]


def _interrupt_unless_told(trainer: Any, error: BaseException) -> None:
    if not getattr(error, _TOLD, False):
        interrupt(trainer, error)
        return
    trainer.state.status = call.TrainerStatus.INTERRUPTED


_of_thread = threading.local()
_enter = InfiniteBarrier.__enter__


def meet_at_infinite_barriers(barrier: Callable[[], None]) -> None:
    """Let the rank of this thread wait for the others where Lightning has an infinite barrier: in rank_zero_first()."""
    _of_thread.barrier = barrier
    InfiniteBarrier.__enter__ = _enter_barrier_of_thread  # type: ignore[method-assign, assignment]


def _enter_barrier_of_thread(barrier: InfiniteBarrier) -> InfiniteBarrier:
    _enter(barrier)
    barrier.barrier = getattr(_of_thread, "barrier", barrier.barrier)
    return barrier
