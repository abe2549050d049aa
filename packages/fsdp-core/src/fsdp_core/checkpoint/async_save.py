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

#: Seconds that the thread waits before it begins a job. The ranks synchronize once more before training continues, and
#: a job that has already begun on one of them would slow down its caller, and so delay all.
_SECONDS_BEFORE_JOB = 0.05

_INTERRUPTED = 130  # the shell's exit status of a process ended by SIGINT

#: Failures that this process has not raised yet; reported when the interpreter exits.
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
        self._last_job: Future[None] | None = None
        self._is_awaited = threading.Event()  # set by whoever waits for the job, so that it begins at once
        self._changed = threading.Condition()  # guards the attributes below
        self._step_count = 0
        self._failure: CheckpointError | None = None
        self._is_choosing_step = False  # while ranks agree on the step at which all raise the failure
        self._raising_step: int | None = None

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

        def write_copies(channel: Runtime) -> None:
            # If one rank finds that deferred tensors were changed too early, all must fail, before they write anything.
            run_on_all(channel, f"copying what {os.fspath(path)} is to hold", self._staging.wait)
            prepared.write(channel)

        self.run(f"saving {os.fspath(path)}", write_copies)

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
            # Exit handlers run in reverse order: registered anew, this one precedes that which destroys process groups.
            atexit.unregister(_exit_if_unfinished)
            atexit.register(_exit_if_unfinished)
        assert self._channel is not None
        self._is_awaited.clear()
        self._last_job = self._thread.submit(self._run_job, self._channel, operation, job)
        _unfinished.add(self._last_job)
        self._last_job.add_done_callback(_unfinished.discard)

    def step(self) -> None:
        """Count a training step, before it is taken.

        Raises:
            CheckpointError: A job has failed, and this is the step at which all ranks raise it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_choosing_step)
            self._step_count += 1
            is_due = self._raising_step is not None and self._step_count >= self._raising_step
        if is_due:
            self.wait()  # which raises the failure

    def wait(self) -> None:
        """Wait for all pending jobs.

        Raises:
            CheckpointError: A job has failed.
        """
        self._is_awaited.set()
        if self._last_job is not None:
            self._last_job.result()
        with self._changed:
            failure = self._failure
            self._failure = None
            self._raising_step = None
        if failure is not None:
            _unraised.remove(failure)
            raise failure

    def close(self) -> None:
        """Wait, then release the thread, the side channel and the memory; a later save creates them again.

        Raises:
            CheckpointError: A job has failed.
        """
        self._is_awaited.set()
        if self._last_job is not None:
            self._last_job.result()  # an interrupt leaves everything as it is
        if self._thread is not None and self._channel is not None:
            self._thread.shutdown()
            self._channel.stop()
            self._staging.free()
            self._thread = None
            self._channel = None
        self.wait()

    def _run_job(self, channel: Runtime, operation: str, job: Callable[[Runtime], None]) -> None:
        """Run a job in the thread. After a failure that is not raised yet, jobs are skipped."""
        if self._failure is not None:
            return
        self._is_awaited.wait(_SECONDS_BEFORE_JOB)
        try:
            run_on_all(channel, operation, lambda: job(channel))  # so that either all ranks fail or none
        except Exception as error:
            self._schedule_failure(channel, operation, error)

    def _schedule_failure(self, channel: Runtime, operation: str, error: Exception) -> None:
        """Let all ranks raise the error of a job at the same step, which they agree on here."""
        error_class = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = error_class(f"{operation} in the background has failed: {error}")
        failure.__cause__ = error
        with self._changed:
            self._is_choosing_step = True
            latest_step = self._step_count
        try:
            # Meanwhile step() waits, so no rank can be past the step that is chosen.
            latest_step = max(channel.gather_objects(latest_step))
        except Exception as gather_error:  # a rank has exited, so the others can't agree
            failure.add_note(f"The ranks could not agree on when to raise this: {gather_error}")
        with self._changed:
            _unraised.append(failure)
            self._failure = failure
            self._raising_step = latest_step + 1
            self._is_choosing_step = False
            self._changed.notify_all()


def _wait_for_all() -> None:
    for future in list(_unfinished):
        future.result()


# The only hook that runs before Python closes the executors of the process, which a remote filesystem may need. It has
# no public name; without it, the thread is joined a little later.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_wait_for_all)


def _forget_parent_jobs() -> None:
    """Drop the parent's jobs in a forked process."""
    _unfinished.clear()
    _unraised.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent_jobs)


def _exit_if_unfinished() -> None:
    """Exit if the wait for the thread was interrupted: the thread still uses the process group."""
    if _unfinished:
        message = "interrupted before a checkpoint was complete; what was there before is unchanged"
        _exit_process(message, status=_INTERRUPTED)


@atexit.register
def _report_unraised() -> None:
    if _unraised:
        _exit_process("\n".join(f"{type(failure).__name__}: {failure}" for failure in _unraised), status=1)


def _exit_process(message: str, *, status: int) -> None:
    """Exit from an exit handler: Python offers no other way to set the exit status there."""
    print(message, file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
