"""The barrier of ranks that are threads, and the errors they get if they can't all arrive.

There is one barrier for exchanging values and for running programs. It compares what the ranks are about to do, so that
ranks that do different things get an error instead of a deadlock. An interrupt is raised at the next barrier, on all
ranks, so that they can still save together.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

from fsdp_core import FSDPError

__all__ = ["RankLostError", "ThreadBarrier"]


class RankLostError(FSDPError, RuntimeError):
    """Another rank has failed, or did not arrive at a barrier."""


class ThreadBarrier:
    """A barrier of threads that records which rank waits where, so that its errors name the reason.

    Args:
        ranks: The number of ranks.
        timeout: How long a rank waits for the others.

    Attributes:
        timeout: How long a rank waits for the others; it may be set at any time.
        building: The rank that is building its model while the others wait for their turn, or ``None``.

    Example:
        >>> ThreadBarrier(1).wait(0, "exchanges values")
    """

    def __init__(self, ranks: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.timeout = timeout
        self.building: int | None = None
        self._ranks = ranks
        self._condition = threading.Condition()
        self._waiting: dict[int, tuple[str, int]] = {}  # the operation and the thread of each rank that has arrived
        self._threads: dict[int, int] = {}  # the thread in which each rank has last arrived
        self._ended: set[int] = set()
        self._round = 0
        self._interrupted_round = -1
        self._is_interrupted = False
        self._failure: str | None = None

    def wait(self, rank: int, operation: str, last_action: Callable[[], None] | None = None) -> None:
        """Wait for all ranks to arrive.

        Args:
            rank: The caller.
            operation: What it is about to do, as the end of the sentence "rank 0 ..."; all ranks must do the same.
            last_action: Called by the last rank to arrive, before any rank continues.

        Raises:
            RankLostError: A rank has failed or ended, is about to do something else, or did not arrive in time.
            KeyboardInterrupt: :meth:`interrupt` was called; all ranks raise it at the same place.
        """
        with self._condition:
            self._check()
            if self.building == rank and self._ranks > 1:
                self._break(
                    f"rank {rank} {operation}, which all ranks must do together, while it builds its model; on the CPU "
                    "ranks build their models one after another, and the others wait for it.\n"
                    "Call barrier(), broadcast() and reductions before or after init_module() and configure_model()."
                )
            current_round = self._round
            self._waiting[rank] = (operation, threading.get_ident())
            self._threads[rank] = threading.get_ident()
            if len(self._waiting) == self._ranks:
                self._release_all(last_action)
            elif self._ended:
                self._break(self._describe_missing(self._ended, "has ended"))
            deadline = time.monotonic() + self.timeout.total_seconds()
            while current_round == self._round:
                self._check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._break(
                        self._describe_missing(
                            set(range(self._ranks)) - set(self._waiting),
                            f"did not arrive within {self.timeout.total_seconds():g} s",
                        )
                    )
                self._condition.wait(min(remaining, threading.TIMEOUT_MAX))
            if current_round == self._interrupted_round:
                raise KeyboardInterrupt

    def leave(self, rank: int) -> None:
        """Record that a rank has ended: ranks that wait for it, now or later, raise."""
        with self._condition:
            self._ended.add(rank)
            if self._waiting and self._failure is None:
                self._failure = self._describe_missing(self._ended, "has ended")
            self._condition.notify_all()

    def interrupt(self) -> None:
        """Make all ranks raise ``KeyboardInterrupt`` at the next barrier. They can use the barrier again afterwards."""
        with self._condition:
            self._is_interrupted = True

    def abort(self) -> None:
        """Make every rank that waits, now or later, raise an error."""
        with self._condition:
            if self._failure is None:
                self._failure = "another rank has failed.\nSee the other rank's error."
            self._condition.notify_all()

    @property
    def broken(self) -> bool:
        """Whether the barrier can't be used any more."""
        return self._failure is not None

    def _release_all(self, last_action: Callable[[], None] | None) -> None:
        if len({operation for operation, _ in self._waiting.values()}) > 1:
            self._break(f"ranks do different things: {self._describe_waiting()}.\n{_SAME_STEPS}")
        if last_action is not None:
            last_action()
        if self._is_interrupted:
            self._is_interrupted, self._interrupted_round = False, self._round
        self._waiting.clear()
        self._round += 1
        self._condition.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise RankLostError(self._failure)

    def _break(self, message: str) -> None:
        self._failure = message
        self._condition.notify_all()
        raise RankLostError(message)

    def _describe_missing(self, missing: set[int], reason: str) -> str:
        ranks = " and ".join(f"{rank}{_user_line(self._threads.get(rank, -1))}" for rank in sorted(missing))
        advice = f"See the other rank's error, if it has one. {_SAME_STEPS}"
        return f"rank {ranks} {reason}, while {self._describe_waiting()}.\n{advice}"

    def _describe_waiting(self) -> str:
        return ", ".join(
            f"rank {rank} {operation}{_user_line(thread)}"
            for rank, (operation, thread) in sorted(self._waiting.items())
        )


_SAME_STEPS = (
    "Every rank must take the same steps: give all as many batches (a DistributedSampler, or drop_last=True), and call "
    "barrier(), self.log(sync_dist=True), print(loss) or .item() on all, not under `if rank == 0`. A rank that needs "
    "longer needs XLAFSDPStrategy(hang_timeout=timedelta(...))."
)

_LIBRARIES = tuple({sysconfig.get_path(path_name) for path_name in ("purelib", "platlib", "stdlib")})


def _user_line(thread: int) -> str:
    """Return the line of user code that a thread runs, in parentheses, to append to a sentence."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = frame.f_globals.get("__name__", "").split(".")[0] in ("fsdp_core", "fsdp_xla")
        if not is_own and not file.startswith((*_LIBRARIES, "<")):
            return f" ({frame.f_code.co_name}, {Path(file).name} line {frame.f_lineno})"
        frame = frame.f_back
    return ""
