"""The private names of Lightning that this package uses, and why. Tested with Lightning 2.6.6."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# What a strategy's launcher must be; Lightning offers no public class for it.
from lightning.fabric.strategies.launchers.launcher import _Launcher as Launcher

# Fabric checks for a launcher of this class before it reports that launch() needs a function.
from lightning.fabric.strategies.launchers.xla import _XLALauncher as LaunchesXLA

# The barrier of rank_zero_first() and prepare_data(). Lightning's uses torch.distributed or does nothing.
from lightning.fabric.utilities.distributed import _InfiniteBarrier as InfiniteBarrier

# The Trainer's loops and their counters; a Trainer keeps its progress nowhere else.
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _BaseProgress as BaseProgress

# Reports an error to callbacks, data module, strategy and loggers. Lightning does so only where ranks were started.
from lightning.pytorch.trainer import call

# Keeps logged values; no public hook of a strategy sees them before something is computed with them.
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector

# Its storage of values.
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric

# Raised by a tuner to end its trial fit; not an error.
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
    "mark_as_reported",
    "meet_at_infinite_barriers",
]

_REPORTED = "_fsdp_xla_reported_in_its_rank"

#: Reports an error to a Trainer's callbacks, data module, strategy and loggers.
interrupt = call._interrupt


def mark_as_reported(error: BaseException) -> None:
    """Keep Lightning from reporting an error where the ranks were started: the ranks have reported it."""
    setattr(error, _REPORTED, True)
    call._interrupt = _interrupt_unless_reported  # type: ignore[assignment]


def _interrupt_unless_reported(trainer: Any, error: BaseException) -> None:
    if not getattr(error, _REPORTED, False):
        interrupt(trainer, error)
        return
    trainer.state.status = call.TrainerStatus.INTERRUPTED


_thread_state = threading.local()
_enter_of_lightning = InfiniteBarrier.__enter__


def meet_at_infinite_barriers(barrier: Callable[[], None]) -> None:
    """Make this thread's rank wait at ``barrier`` instead of Lightning's infinite barrier, as in rank_zero_first()."""
    _thread_state.barrier = barrier
    InfiniteBarrier.__enter__ = _enter_barrier_of_thread  # type: ignore[method-assign, assignment]


def _enter_barrier_of_thread(barrier: InfiniteBarrier) -> InfiniteBarrier:
    _enter_of_lightning(barrier)
    barrier.barrier = getattr(_thread_state, "barrier", barrier.barrier)
    return barrier
