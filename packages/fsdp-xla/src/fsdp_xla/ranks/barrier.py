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
        timeout: The same; it may be set at any time.
        building: The rank that is building its model while the others wait for their turn, or ``None``.

    Example:
        >>> ThreadBarrier(1).wait(0, "exchanges values")
    """

    def __init__(self, ranks: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.timeout = timeout
        self.building: int | None = None
        self._ranks = ranks
        self._condition = threading.Condition()
        self._waiting: dict[int, tuple[str, int]] = {}  # what each rank waits to do, and in which thread
        self._threads: dict[int, int] = {}  # in which each rank has waited before
        self._ended: set[int] = set()
        self._turn = 0
        self._interrupted_turn = -1
        self._interrupt = False
        self._broken: str | None = None

    def wait(self, rank: int, operation: str, then: Callable[[], None] | None = None) -> None:
        """Wait for all ranks to arrive.

        Args:
            rank: The caller.
            operation: What it is about to do, as the end of the sentence "rank 0 ..."; all ranks must do the same.
            then: Called by the last rank to arrive, before any rank continues.

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
            turn = self._turn
            self._waiting[rank] = (operation, threading.get_ident())
            self._threads[rank] = threading.get_ident()
            if len(self._waiting) == self._ranks:
                self._all_here(then)
            elif self._ended:
                self._break(self._never(self._ended, "has ended"))
            end = time.monotonic() + self.timeout.total_seconds()
            while turn == self._turn:
                self._check()
                remaining = end - time.monotonic()
                if remaining <= 0:
                    self._break(
                        self._never(
                            set(range(self._ranks)) - set(self._waiting),
                            f"did not arrive within {self.timeout.total_seconds():g} s",
                        )
                    )
                self._condition.wait(min(remaining, threading.TIMEOUT_MAX))
            if turn == self._interrupted_turn:
                raise KeyboardInterrupt

    def leave(self, rank: int) -> None:
        """Record that a rank has ended: ranks that wait for it, now or later, raise."""
        with self._condition:
            self._ended.add(rank)
            if self._waiting and self._broken is None:
                self._broken = self._never(self._ended, "has ended")
            self._condition.notify_all()

    def interrupt(self) -> None:
        """Make all ranks raise ``KeyboardInterrupt`` at the next barrier. They can use the barrier again afterwards."""
        with self._condition:
            self._interrupt = True

    def abort(self) -> None:
        """Raise in every rank that waits, now or later."""
        with self._condition:
            if self._broken is None:
                self._broken = "another rank has failed.\nSee the other rank's error."
            self._condition.notify_all()

    @property
    def broken(self) -> bool:
        """Whether the barrier can't be used any more."""
        return self._broken is not None

    def _all_here(self, then: Callable[[], None] | None) -> None:
        if len({operation for operation, _ in self._waiting.values()}) > 1:
            self._break(f"ranks do different things: {self._waits()}.\n{_ALIKE}")
        if then is not None:
            then()
        if self._interrupt:
            self._interrupt, self._interrupted_turn = False, self._turn
        self._waiting.clear()
        self._turn += 1
        self._condition.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise RankLostError(self._broken)

    def _break(self, why: str) -> None:
        self._broken = why
        self._condition.notify_all()
        raise RankLostError(why)

    def _never(self, missing: set[int], how: str) -> str:
        ranks = " and ".join(f"{rank}{_line(self._threads.get(rank, -1))}" for rank in sorted(missing))
        return f"rank {ranks} {how}, while {self._waits()}.\nSee the other rank's error, if it has one. {_ALIKE}"

    def _waits(self) -> str:
        return ", ".join(
            f"rank {rank} {operation}{_line(thread)}" for rank, (operation, thread) in sorted(self._waiting.items())
        )


_ALIKE = (
    "Every rank must take the same steps: give all as many batches (a DistributedSampler, or drop_last=True), and call "
    "barrier(), self.log(sync_dist=True), print(loss) or .item() on all, not under `if rank == 0`. A rank that needs "
    "longer needs XLAFSDPStrategy(hang_timeout=timedelta(...))."
)

_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")})


def _line(thread: int) -> str:
    """The line of user code at which a thread is, in parentheses, to append to a sentence."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        own = frame.f_globals.get("__name__", "").split(".")[0] in ("fsdp_core", "fsdp_xla")
        if not own and not file.startswith((*_LIBRARIES, "<")):
            return f" ({frame.f_code.co_name}, {Path(file).name} line {frame.f_lineno})"
        frame = frame.f_back
    return ""
