"""Each rank's watching thread: it says when the rank has waited for too long, and ends it when a run can't go on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import ref

from torch import distributed as dist

from fsdp_core.errors import FSDPError, first_line, warn
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private.process_groups import is_default_group
from fsdp_core.watch.hub import Hub
from fsdp_core.watch.locations import StandStill, location_of, stacks
from fsdp_core.watch.messages import Connection, connect
from fsdp_core.watch.verdicts import PATIENCE, Member, Report, Verdict, describe_unanswered, verdict_of_loss

__all__ = ["explain", "explain_uncaught", "watch"]

#: Seconds in which a rank may end by itself, with an exception of its own, once another one is gone.
_GRACE = 15.0

#: Seconds in which ranks may finish writing their stacks, after a hang.
_GRACE_AFTER_HANG = 2.0

#: Seconds between two looks at where the training thread stands, at least and at most.
_MIN_INTERVAL, _MAX_INTERVAL = 0.1, 10.0

#: Seconds in which rank 0 answers a rank that has waited for too long: longer than it gives the others.
_UNANSWERED = 9.0

#: Seconds that an exception waits to learn which rank is gone, and which is late.
_SECONDS_TO_LEARN, _SECONDS_TO_LEARN_WHO_IS_LATE = 3.0, 10.0

#: What libraries write into exceptions when another rank is gone, or too late.
_LOSS_MESSAGES = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|remote (process|peer)|unhandled system error|"
    r"peer (has )?(closed|exited)|socket|monitoredBarrier",
    re.IGNORECASE,
)

#: How an exception begins that torch has carried over from another process or thread.
_CAUGHT = re.compile(r"\w+: Caught \w+ (in .+?)\.?$")

_watching: Watcher | None = None

#: The process group whose ranks are watched.
_group: Callable[[], Any] | None = None


class Watcher:
    """The thread, for as long as the process group lasts.

    Args:
        connection: To rank 0.
        member: This rank.
        first: Rank 0.
        hang_timeout: After how many seconds it says that it waits.
        progress: How far the rank is, in words.
        hub: Rank 0's thread, on rank 0.
    """

    def __init__(
        self,
        connection: Connection,
        member: Member,
        first: Member,
        *,
        hang_timeout: float,
        progress: Callable[[], str],
        hub: Hub | None,
    ) -> None:
        self.hang_timeout = hang_timeout
        self.progress = progress
        self.verdict: Verdict | None = None
        self.verdict_arrived = threading.Event()
        self._connection = connection
        self._member = member
        self._first = first
        self._hub = hub
        self._selector = selectors.DefaultSelector()  # select() takes no file numbers above 1,023
        self._selector.register(connection, selectors.EVENT_READ)
        self._training_thread = threading.get_ident()
        #: The ranks whose script has ended, as rank 0 knows them once it has answered "who?".
        self._ended: list[Member] = []
        self._answered = threading.Event()
        #: When this rank reported a hang, or that it waits for what may take long; ``None`` once rank 0 has answered.
        self._reported_at: float | None = None
        self._slow_report_at: float | None = None
        #: For how many seconds it had waited when it reported.
        self._waited = hang_timeout
        #: Whether the wait that goes on was reported as one that may take long.
        self._has_reported_slow = False
        #: When this process ends.
        self._end_at: float | None = None
        #: Whether an exception waits for the verdict.
        self._explaining = False
        #: Whether this rank has nothing more to do with the others.
        self._has_left = False
        #: Whether the connection to rank 0 has ended.
        self._is_alone = False
        #: Whether this rank is the one that writes the verdict.
        self._writes = False
        self._thread = threading.Thread(target=self._run, name="fsdp-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._selector:
            self._watch()

    def _watch(self) -> None:
        standing = StandStill(self._training_thread)
        while not self._has_left:
            interval = min(max(self.hang_timeout / 10, _MIN_INTERVAL), _MAX_INTERVAL)
            if self._end_at is not None:
                interval = min(interval, _GRACE_AFTER_HANG)
            self._read(interval)
            now = time.monotonic()
            if self._has_left or (self._end_at is None and self._is_alone):
                return
            if self._end_at is not None:
                if now >= self._end_at:
                    self._end()
            elif self._reported_at is not None:
                if now - self._reported_at > _UNANSWERED:
                    self._accept_verdict(self._judge_rank_0(), writes=self._member.rank == 1)
            else:
                self._check_standstill(standing.seconds(), now)

    def _check_standstill(self, seconds: float, now: float) -> None:
        """Say to rank 0 that this rank has waited for too long, or, once, that it waits for what may take long."""
        if seconds < self.hang_timeout:
            self._slow_report_at = None
            self._has_reported_slow = False
            return
        if self._slow_report_at is not None and now - self._slow_report_at > _UNANSWERED:
            self._slow_report_at = None
            if self._member.rank == 1:
                waited = f"{self.hang_timeout:g} s for {location_of(self._training_thread).awaited}"
                _write(f"fsdp-core: {describe_unanswered(self._member, self._first, waited, may_go_on=True)}\n")
        if self._has_reported_slow and seconds < PATIENCE * self.hang_timeout:
            return
        report = self._report(self.hang_timeout)
        if not report.location.waits or not _is_group_current():
            return
        may_go_on = bool(report.location.awaited) and seconds < PATIENCE * self.hang_timeout
        if may_go_on:
            self._slow_report_at = now
            self._has_reported_slow = True
        else:
            self._reported_at = now
        has_lost_patience = bool(report.location.awaited) and not may_go_on
        self._waited = PATIENCE * self.hang_timeout if has_lost_patience else self.hang_timeout
        self._connection.send(kind="waits", seconds=self._waited, may_go_on=may_go_on, report=asdict(report))

    def _read(self, wait: float) -> None:
        if self._is_alone:
            time.sleep(min(wait, 1.0))
            return
        try:
            if self._selector.select(wait):
                for message in self._connection.receive():
                    self._handle_message(message)
        except (ConnectionError, OSError, ValueError) as error:
            self._is_alone = True
            if not self._has_left and self.verdict is None:
                cut_off = isinstance(error, ConnectionAbortedError)
                verdict = verdict_of_loss([self._first], self.progress(), host_is_silent=cut_off)
                self._accept_verdict(verdict, writes=self._member.rank == 1)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if message["kind"] == "report?":
            self._connection.send(kind="report", report=asdict(self._report(self.hang_timeout)))
        elif message["kind"] == "verdict":
            fields = message["verdict"]
            kill = tuple(Member(**member_fields) for member_fields in fields["kill"])
            verdict = Verdict(kind=fields["kind"], message=fields["message"], kill=kill)
            self._accept_verdict(verdict, writes=self._member.rank == 0)
        elif message["kind"] == "noted":
            self._slow_report_at = None
        elif message["kind"] == "ended":
            self._ended = [Member(**member_fields) for member_fields in message["members"]]
            self._answered.set()
        elif message["kind"] == "bye":  # rank 0 has ended: regularly, or since another rank's script had ended
            self._is_alone = True
            self._ended = [Member(**member_fields) for member_fields in message["members"]] or [self._first]
            self._answered.set()

    def _report(self, wait_limit: float) -> Report:
        return Report(progress=self.progress(), location=location_of(self._training_thread, wait_limit=wait_limit))

    def _judge_rank_0(self) -> Verdict:
        """The verdict of this rank on rank 0, which does not answer."""
        awaited = location_of(self._training_thread).awaited
        waited = f"{self._waited:g} s {self.progress()}{awaited and f', for {awaited}'}"
        message = describe_unanswered(self._member, self._first, waited, may_go_on=False)
        return Verdict(kind="hang", message=message, kill=(self._first,))

    def _accept_verdict(self, verdict: Verdict, *, writes: bool) -> None:
        if self.verdict is not None or not self.progress():  # nothing trains any more
            return
        self.verdict = verdict
        if verdict.kind == "hang":
            watching_threads = (self._thread.ident, None if self._hub is None else self._hub.thread)
            own_threads = {thread for thread in watching_threads if thread is not None}
            location = location_of(self._training_thread)
            _write(
                f"rank {self._member.rank} on {self._member.host}, {self.progress()}; the last collective that it has "
                f"entered: {location.collective or 'not known'}\n{stacks(own_threads)}"
            )
        self._writes = writes
        if writes and verdict.kind != "hang":
            _write(f"fsdp-core: {verdict.message}\n")
        self.verdict_arrived.set()
        if verdict.kind != "hang" or self._explaining:
            grace = _GRACE
        elif writes:  # sooner than the others, whose end would end this rank before it has written
            grace = _GRACE_AFTER_HANG / 2
        elif self._first in verdict.kill:  # rank 1 kills rank 0 and writes why, and may notice it later than this rank
            grace = _GRACE_AFTER_HANG * 3
        else:
            grace = _GRACE_AFTER_HANG
        self._end_at = time.monotonic() + grace

    def _end(self) -> None:
        """End this process, unless the watched process group exists no more."""
        self._end_at = None
        if not _is_group_current():
            self._has_left = True
            return
        assert self.verdict is not None
        for member in self.verdict.kill:
            if member.host == self._member.host and start_time_of(member.pid) == member.started != "":
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
        if self.verdict.kind == "hang" and self._writes:  # after the stacks of all
            _write(f"fsdp-core: {self.verdict.message}\n")
        elif self.verdict.kind != "hang" and not self._writes:
            _write(f"fsdp-core: rank {self._member.rank} ends: {self.verdict.message.splitlines()[0]}\n")
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        for child in multiprocessing.active_children():  # a loader's workers, which may hang and would outlive it
            if child.daemon:
                child.kill()
        os._exit(1)

    def tell_others(self, error: BaseException) -> None:
        """Tell the others of an exception that ends this rank, unless it comes from the loss of another one."""
        if not isinstance(error, Exception) or _is_explained(error) or _comes_from_loss(error):
            return
        line = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
        if caught := _CAUGHT.match(line):  # the text of an exception of a loader's worker is its traceback
            line = f"{str(error).rstrip().splitlines()[-1]}, {caught[1]}"
        advice = "\n".join(str(error).splitlines()[1:])[:1000] if isinstance(error, FSDPError) else ""
        self._connection.send(kind="raised", error=line[:300], progress=self.progress(), advice=advice)

    def explain(self, error: BaseException) -> None:
        """Add to an exception which rank is gone, if that may be its cause."""
        text = str(error)
        if not isinstance(error, Exception) or _is_explained(error) or not _comes_from_loss(error):
            return
        self._explaining = True
        is_late = re.search(r"timed? ?out", text, re.IGNORECASE) is not None
        if self.verdict is None and is_late:
            self._connection.send(kind="waits", seconds=0.0, report=asdict(self._report(0.0)))
        if not self.verdict_arrived.wait(_SECONDS_TO_LEARN_WHO_IS_LATE if is_late else _SECONDS_TO_LEARN):
            self._connection.send(kind="who?")
            self._answered.wait(1.0)
        if self.verdict is not None:
            error.add_note(f"fsdp-core: {self.verdict.message}")
        elif self._ended:
            names = ", ".join(f"rank {member.rank} on {member.host}" for member in self._ended)
            error.add_note(
                f"fsdp-core: the script has ended on {names}, and this rank went on {self.progress()}.\n"
                "Let all ranks take as many steps, and call what communicates equally often. If it was to end later, "
                "see its log: sys.exit() and Ctrl-C end a script too."
            )

    def leave(self) -> None:
        """End the thread, as this rank has nothing to do any more with the others."""
        self._has_left = True
        self._connection.send(kind="bye")
        if self._hub is not None:
            self._hub.close()

    def abandon(self) -> None:
        """In a process that was forked: close the sockets, which the parent goes on to use."""
        self._has_left = True
        self._selector.close()
        self._connection.close()
        if self._hub is not None:
            self._hub.abandon()


def watch(runtime: Runtime, hang_timeout: timedelta, address: str, progress: Callable[[], str]) -> None:
    """Watch this rank and the others for as long as the process group lasts. All ranks must call it.

    A rank whose process ends without a word is noticed at once by its connection to rank 0, and named; so is a rank
    that an exception ends. A rank whose training thread has stood at one place for ``hang_timeout``, waiting for
    others, makes all ranks write their stacks; the one that is behind is named. Then all end with status 1. It costs
    the training thread nothing: another thread looks where it stands, ten times in that duration.

    Args:
        runtime: The ranks, which are processes.
        hang_timeout: How long ranks may wait for each other at one place.
        address: The address of rank 0's host.
        progress: How far this rank is, in words, such as ``"at step 12"``; empty once it does not train any more, when
            lost ranks are nobody's concern. Called on another thread.
    """
    global _watching, _group
    seconds = hang_timeout.total_seconds()
    if _is_group_current():  # on all ranks: also on one that could not connect
        if _watching is not None:
            _watching.hang_timeout = seconds
            _watching.progress = progress
        return
    _leave()
    _group = ref(dist.group.WORLD)
    own = Member(rank=runtime.rank, host=socket.gethostname(), pid=os.getpid(), started=start_time_of(os.getpid()))
    hub = Hub(runtime.world_size, progress) if runtime.rank == 0 else None
    greeting = runtime.broadcast_object(None if hub is None else (hub.port, hub.token, own))
    port, token, first = greeting
    addresses = ["localhost"] if first.host == own.host else []
    connection = connect([*addresses, address, first.host], port, kind="hello", token=token, member=asdict(own))
    if connection is None:
        warn(
            f"rank {own.rank} on {own.host} can't reach rank 0 at {address}:{port}, to be watched. If it is lost or "
            "hangs, the others learn of it when their collectives time out.\n"
            "Let the hosts of a run reach each other at any port, or write hang_timeout=None."
        )
        return
    _watching = Watcher(connection, own, first, hang_timeout=seconds, progress=progress, hub=hub)
    _install_hooks()
    # processes of multiprocessing, as in notebooks and under torch.multiprocessing.spawn, call nothing of atexit's
    util.Finalize(None, _leave, exitpriority=0)


def _is_group_current() -> bool:
    """Whether the watched process group is the one that exists now."""
    group = None if _group is None else _group()
    return group is not None and is_default_group(group)


def explain(error: BaseException) -> None:
    """Add a note to an exception that may come from the loss of another rank: which rank was lost, and where."""
    if _watching is not None:
        _watching.explain(error)


def _is_explained(error: BaseException) -> bool:
    return any("fsdp-core: " in note for note in getattr(error, "__notes__", ()))


def _comes_from_loss(error: BaseException) -> bool:
    """Whether an exception is one in which collectives end when another rank is gone, or too late."""
    return isinstance(error, (RuntimeError, OSError)) and _LOSS_MESSAGES.search(str(error)) is not None


def start_time_of(pid: int) -> str:
    """When a process was started, in clock ticks: a later process with the same id has another start time."""
    with suppress(OSError, IndexError):
        # as bytes: the kernel cuts a process's name after 15 bytes, which may be within a character
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    return ""


def explain_uncaught(call: Callable[[BaseException], None]) -> None:
    """Let a function add notes to an exception that nothing has caught, before it is printed. Idempotent."""
    if call not in _explanations:
        _explanations.append(call)
    _install_hooks()


_explanations: list[Callable[[BaseException], None]] = []
_installed = False


def _install_hooks() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    previous_hook = sys.excepthook

    def report_uncaught(
        error_class: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if _watching is not None:
            _watching.explain(error)
        for call in _explanations:
            with suppress(Exception):
                call(error)
        try:
            previous_hook(error_class, error, traceback)  # the traceback comes first, then what it means to the others
            _flush()
        finally:
            if _watching is not None:
                _watching.tell_others(error)

    sys.excepthook = report_uncaught
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_abandon)


def _leave() -> None:
    global _watching
    watcher = _watching
    _watching = None
    if watcher is not None:
        watcher.leave()


def _abandon() -> None:
    global _watching
    if _watching is not None:
        _watching.abandon()
    _watching = None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _write(text: str) -> None:
    """Write to the process's standard error in one piece, past what Python may have put in its place."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
