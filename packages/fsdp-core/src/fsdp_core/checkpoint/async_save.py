"""Asynchronous saves in a background thread: their order, and how failures are reported."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.saving import prepare_save
from fsdp_core.checkpoint.staging import Staging
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.errors import CheckpointError
from fsdp_core.runtime import Runtime

__all__ = ["AsyncSaves"]

#: Seconds that the thread waits before it competes with its caller for the interpreter and a core: the ranks
#: synchronize once more before training continues, and a save that has begun on one of them would delay all.
_HEAD_START = 0.05

_INTERRUPTED = 130  # the shell's exit status of a process ended by SIGINT

#: Failures that no rank has raised yet; reported when the interpreter exits.
_unraised: list[CheckpointError] = []
#: The pending jobs of all instances.
_unfinished: set[Future[None]] = set()


class AsyncSaves:
    """Writes checkpoints in one background thread, in the order of the calls, while the caller continues.

    Every rank has one instance, and all ranks call the same methods in the same order. After a failure, pending jobs
    are skipped until the failure has been raised, so a removal that waits for a newer checkpoint does not happen
    without that checkpoint. A failure is raised once, by the first :meth:`step`, :meth:`save`, :meth:`wait` or
    :meth:`close`, which is the same on every rank. If the interpreter exits before that, the failure is written to
    stderr, and the exit status is 1.

    Args:
        runtime: The ranks. Its side channel is created when the thread starts.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._staging = Staging()
        self._channel: Runtime | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._changed = threading.Condition()  # guards the attributes below
        self._awaited = threading.Event()
        self._steps = 0
        self._failure: CheckpointError | None = None
        self._choosing = False
        self._raise_at: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncSaves:
        """Return an instance without pending jobs: ranks that are threads start from copies of what was built."""
        return AsyncSaves(copy.deepcopy(self._runtime, memo))

    def save(
        self,
        path: StrPath,
        state: Mapping[str, Any],
        *,
        deferred: Callable[[Tensor], Sequence[Tensor] | None] | None = None,
        **options: Any,
    ) -> None:
        """Copy a state, and write the copy in the background. Waits for pending jobs first.

        Args:
            path: As in :func:`~fsdp_core.checkpoint.save`.
            state: The state to save; it may be changed as soon as this returns, except for deferred tensors.
            deferred: Which tensors in host memory are copied in the background, too; see
                :meth:`~fsdp_core.checkpoint.staging.Staging.copy`. They must not be changed before
                :meth:`finish_copying` has returned.
            **options: The other arguments of :func:`~fsdp_core.checkpoint.save`, except ``runtime``.

        Raises:
            CheckpointError: The state or the path is refused, or a pending job has failed; nothing is saved then.
        """
        self.wait()
        prepared = prepare_save(
            path,
            state,
            runtime=self._runtime,
            stage=lambda plan: self._staging.copy(plan, self._runtime.rank, deferred=deferred),
            **options,
        )

        def write(channel: Runtime) -> None:
            # on all ranks before the first collective: what one of them finds written to may be copied on others
            run_on_all(channel, f"copying what {os.fspath(path)} is to hold", self._staging.wait)
            prepared.write(channel)

        self.run(f"saving {os.fspath(path)}", write)

    def finish_copying(self) -> None:
        """Wait until the deferred tensors of the last save are copied. To be called before they are changed."""
        self._staging.finish()

    def run(self, operation: str, job: Callable[[Runtime], None]) -> None:
        """Run a job in the thread, after all pending jobs.

        Args:
            operation: What the job does, for the error: ``"removing /data/old.ckpt"``.
            job: Called with a runtime whose collectives it may use.
        """
        if self._thread is None:
            self._channel = self._runtime.side_channel()
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp-save")
            atexit.unregister(_leave_unfinished)  # must run before the process group is destroyed, which exists by now
            atexit.register(_leave_unfinished)
        assert self._channel is not None
        self._awaited.clear()
        self._last = self._thread.submit(self._work, self._channel, operation, job)
        _unfinished.add(self._last)
        self._last.add_done_callback(_unfinished.discard)

    def step(self) -> None:
        """Count a training step, before it is taken.

        Raises:
            CheckpointError: A job has failed, and this is the step at which all ranks raise it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._choosing)
            self._steps += 1
            due = self._raise_at is not None and self._steps >= self._raise_at
        if due:
            self.wait()

    def wait(self) -> None:
        """Wait for all pending jobs.

        Raises:
            CheckpointError: A job has failed.
        """
        self._awaited.set()
        if self._last is not None:
            self._last.result()
        with self._changed:
            failure = self._failure
            self._failure = None
            self._raise_at = None
        if failure is not None:
            _unraised.remove(failure)
            raise failure

    def close(self) -> None:
        """Wait, then release the thread, the side channel and the memory; a later save creates them again.

        Raises:
            CheckpointError: A job has failed.
        """
        self._awaited.set()
        if self._last is not None:
            self._last.result()  # an interrupt leaves everything as it is
        if self._thread is not None and self._channel is not None:
            self._thread.shutdown()
            self._channel.stop()
            self._staging.free()
            self._thread = None
            self._channel = None
        self.wait()

    def _work(self, channel: Runtime, operation: str, job: Callable[[Runtime], None]) -> None:
        if self._failure is not None:
            return
        self._awaited.wait(_HEAD_START)
        try:
            run_on_all(channel, operation, lambda: job(channel))  # so that either all ranks fail or none
        except Exception as error:
            self._fail(channel, operation, error)

    def _fail(self, channel: Runtime, operation: str, error: Exception) -> None:
        error_class = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = error_class(f"{operation} in the background has failed: {error}")
        failure.__cause__ = error
        with self._changed:
            self._choosing = True
            steps = self._steps
        try:
            # no rank begins another step meanwhile, so none is past the chosen one
            steps = max(channel.gather_objects(steps))
        except Exception as gone:  # a rank has exited, so the others can't agree
            failure.add_note(f"The ranks could not agree on when to raise this: {gone}")
        with self._changed:
            _unraised.append(failure)
            self._failure = failure
            self._raise_at = steps + 1
            self._choosing = False
            self._changed.notify_all()


def _wait_for_all() -> None:
    for future in list(_unfinished):
        future.result()


# The only hook that runs before Python closes the executors of the process, which a remote filesystem may need. It has
# no public name; without it, the thread is joined a little later.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_wait_for_all)


def _forget() -> None:
    """Drop the parent's jobs in a forked process."""
    _unfinished.clear()
    _unraised.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _leave_unfinished() -> None:
    """Exit if the wait for the thread was interrupted: the thread still uses the process group."""
    if _unfinished:
        _end("interrupted before a checkpoint was complete; what was there before is unchanged", _INTERRUPTED)


@atexit.register
def _report_unraised() -> None:
    if _unraised:
        _end("\n".join(f"{type(failure).__name__}: {failure}" for failure in _unraised), 1)


def _end(message: str, status: int) -> None:
    """Exit from an exit handler: Python offers no other way to set the exit status there."""
    print(message, file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
