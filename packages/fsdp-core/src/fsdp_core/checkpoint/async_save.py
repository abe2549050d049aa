"""Saves that go on in the background: what they wait for, and how a failure is told."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fsdp_core.checkpoint.collective import together
from fsdp_core.checkpoint.saving import prepare_save
from fsdp_core.checkpoint.staging import Staging
from fsdp_core.checkpoint.storage.folder import StrPath
from fsdp_core.errors import CheckpointError
from fsdp_core.runtime import Runtime

__all__ = ["AsyncSaves"]

#: Seconds that the thread leaves to its caller before it takes the interpreter and a core from it: the ranks meet once
#: more before training goes on, and a save that has begun on one of them would hold up all.
_HEAD_START = 0.05

_INTERRUPTED = 130  # what a shell gives for a process that SIGINT has ended

#: What no rank has raised yet; told when the interpreter ends.
_untold: list[CheckpointError] = []
#: What is not done yet, of all that were ever made.
_unfinished: set[Future[None]] = set()


class AsyncSaves:
    """Writes checkpoints in one thread, in the order that they are asked for, while the caller goes on.

    Every rank has one, and all call the same methods in the same order. Nothing that follows a failure is done until
    the failure has been raised, so a removal that waits for a newer checkpoint does not happen without it. A failure is
    raised once, by the :meth:`step`, :meth:`save`, :meth:`wait` or :meth:`close` that comes first, which is the same on
    every rank. If the interpreter ends before, it is written to stderr, and the exit status is 1.

    Args:
        runtime: The ranks. A side channel of it is made when the thread starts.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._staging = Staging()
        self._channel: Runtime | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._changed = threading.Condition()  # guards what follows
        self._awaited = threading.Event()
        self._steps = 0
        self._failure: CheckpointError | None = None
        self._choosing = False
        self._raise_at: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncSaves:
        """One with nothing pending: where ranks are threads, each starts from a copy of what was built before them."""
        return AsyncSaves(copy.deepcopy(self._runtime, memo))

    def save(self, path: StrPath, state: Mapping[str, Any], **options: Any) -> None:
        """Copy a state, and write the copy behind the caller's back. Waits for what is pending first.

        Args:
            path: As in :func:`~fsdp_core.checkpoint.save`.
            state: What to save; it may be changed as soon as this returns.
            **options: The further arguments of :func:`~fsdp_core.checkpoint.save`, without ``runtime``.

        Raises:
            CheckpointError: The state or the path is refused, or what was pending has failed; then nothing is saved.
        """
        self.wait()
        prepared = prepare_save(
            path,
            state,
            runtime=self._runtime,
            stage=lambda plan: self._staging.copy(plan, self._runtime.rank),
            **options,
        )

        def write(channel: Runtime) -> None:
            self._staging.wait()
            prepared.write(channel)

        self.run(f"saving {os.fspath(path)}", write)

    def run(self, doing: str, job: Callable[[Runtime], None]) -> None:
        """Do something in the thread, behind all that is pending.

        Args:
            doing: What the job does, for the error: ``"removing /data/old.ckpt"``.
            job: Is given ranks that it may let talk.
        """
        if self._thread is None:
            self._channel = self._runtime.side_channel()
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp-save")
            atexit.unregister(_leave_unfinished)  # has to run before the ranks part, who have met by now
            atexit.register(_leave_unfinished)
        assert self._channel is not None
        self._awaited.clear()
        self._last = self._thread.submit(self._work, self._channel, doing, job)
        _unfinished.add(self._last)
        self._last.add_done_callback(_unfinished.discard)

    def step(self) -> None:
        """Count a step of training, before it is taken.

        Raises:
            CheckpointError: Something has failed, and this is the step at which all ranks raise it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._choosing)
            self._steps += 1
            due = self._raise_at is not None and self._steps >= self._raise_at
        if due:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is pending.

        Raises:
            CheckpointError: Something has failed.
        """
        self._awaited.set()
        if self._last is not None:
            self._last.result()
        with self._changed:
            failure, self._failure, self._raise_at = self._failure, None, None
        if failure is not None:
            _untold.remove(failure)
            raise failure

    def close(self) -> None:
        """Wait, and give back the thread, the side channel and the memory; a later save makes them anew.

        Raises:
            CheckpointError: Something has failed.
        """
        self._awaited.set()
        if self._last is not None:
            self._last.result()  # an interrupt leaves everything as it is
        if self._thread is not None and self._channel is not None:
            self._thread.shutdown()
            self._channel.stop()
            self._staging.free()
            self._thread, self._channel = None, None
        self.wait()

    def _work(self, channel: Runtime, doing: str, job: Callable[[Runtime], None]) -> None:
        if self._failure is not None:
            return
        self._awaited.wait(_HEAD_START)
        try:
            together(channel, doing, lambda: job(channel))  # so that all ranks fail, or none
        except Exception as error:
            self._fail(channel, doing, error)

    def _fail(self, channel: Runtime, doing: str, error: Exception) -> None:
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = kind(f"{doing} in the background has failed: {error}")
        failure.__cause__ = error
        with self._changed:
            self._choosing, steps = True, self._steps
        try:
            # no rank begins another step meanwhile, so none is beyond the one that is chosen
            steps = max(channel.gather_objects(steps))
        except Exception as gone:  # a rank has gone, and with it the others' way to agree
            failure.add_note(f"The ranks could not agree on when to raise this: {gone}")
        with self._changed:
            _untold.append(failure)
            self._failure, self._raise_at, self._choosing = failure, steps + 1, False
            self._changed.notify_all()


def _wait_for_all() -> None:
    for future in list(_unfinished):
        future.result()


# The one moment before Python closes the executors of the process, which a remote filesystem may need. There is no
# public name for it; without it, the thread is waited for a little later.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_wait_for_all)


def _forget() -> None:
    """A forked process has no part in what its parent does."""
    _unfinished.clear()
    _untold.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _leave_unfinished() -> None:
    """End the process if the wait for the thread was interrupted: the ranks can't part while it lets them talk."""
    if _unfinished:
        _end("interrupted before a checkpoint was complete; what was there before is unchanged", _INTERRUPTED)


@atexit.register
def _tell_untold() -> None:
    if _untold:
        _end("\n".join(f"{type(failure).__name__}: {failure}" for failure in _untold), 1)


def _end(message: str, status: int) -> None:
    """End the process from within its own end, whose exit status Python offers no other way to set."""
    print(message, file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
