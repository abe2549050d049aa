"""Rank 0's watching thread, which all ranks are connected to: it notices who is gone, and asks when ranks hang."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fsdp_core.watch.locations import Location
from fsdp_core.watch.messages import Connection, listen
from fsdp_core.watch.verdicts import (
    Member,
    Report,
    Verdict,
    describe_slow_wait,
    verdict_of_error,
    verdict_of_hang,
    verdict_of_loss,
)

__all__ = ["Hub"]

#: Seconds in which the losses of one event are collected, such as those of all ranks of a host.
_SECONDS_TO_SETTLE = 0.5

#: Seconds that ranks have to answer where they stand.
_SECONDS_TO_ANSWER = 5.0


class Hub:
    """The thread. It begins to listen at once.

    Args:
        world_size: The number of ranks.
        progress: How far this rank is, in words.

    Attributes:
        port: Where it listens.
        token: What ranks greet it with.
    """

    def __init__(self, world_size: int, progress: Callable[[], str]) -> None:
        self.token = secrets.token_hex(16)
        self._progress = progress
        self._world_size = world_size
        self._listening = listen()
        self.port: int = self._listening.getsockname()[1]
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._unknown: set[Connection] = set()
        self._members: dict[Connection, Member] = {}
        self._all: dict[int, Member] = {}
        self._ended: set[int] = set()
        self._ended_for_others: set[int] = set()
        self._gone: list[Member] = []
        self._is_host_silent = False
        self._decide_at: float | None = None
        self._reports: dict[int, Report] = {}
        self._waited_seconds: float | None = None
        self._may_go_on = False
        self._slow_report_at = float("-inf")
        self._verdict: Verdict | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fsdp-watch hub", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int | None:
        return self._thread.ident

    def close(self) -> None:
        """Say goodbye to all, and end."""
        self._closing = True
        with suppress(OSError):
            self._wake_writer.send(b"-")
        self._thread.join(5.0)

    def abandon(self) -> None:
        """In a process that was forked: close the sockets, which the parent goes on to use."""
        self._selector.close()
        sockets: list[socket.socket | Connection] = [self._listening, self._wake_writer, self._wake_reader]
        for open_socket in (*sockets, *self._members, *self._unknown):
            with suppress(OSError):
                open_socket.close()

    def _run(self) -> None:
        while not self._closing:
            wait = None if self._decide_at is None else max(0.0, self._decide_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.data, Connection):
                    self._read(key.data)
            if self._decide_at is not None and time.monotonic() >= self._decide_at:
                self._decide()
        for connection in self._members:
            connection.send(kind="bye", members=self._ranks_ended_first())
        self.abandon()

    def _accept(self) -> None:
        with suppress(OSError):
            connection = Connection(self._listening.accept()[0])
            self._unknown.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._handle_message(connection, message)
        except ConnectionError as error:
            self._drop(connection, silent_host=isinstance(error, ConnectionAbortedError))
        except (KeyError, TypeError, ValueError):  # not from a rank of ours
            self._drop(connection, silent_host=False)

    def _handle_message(self, connection: Connection, message: dict[str, Any]) -> None:
        message_type = message["kind"]
        if connection in self._unknown:
            if message_type != "hello" or not secrets.compare_digest(str(message["token"]), self.token):
                raise ValueError("not a rank")
            member = Member(**message["member"])
            self._unknown.discard(connection)
            self._members[connection] = self._all[member.rank] = member
            connection.send(kind="welcome")
            return
        member = self._members[connection]
        if message_type == "bye":
            self._ended.add(member.rank)
        elif message_type == "raised":
            self._ended.add(member.rank)
            if self._verdict is None and not self._gone:
                error, progress, advice = (str(message[key]) for key in ("error", "progress", "advice"))
                self._announce(verdict_of_error(member, error, progress, advice))
        elif message_type in ("waits", "report"):
            report = dict(message["report"])
            self._reports[member.rank] = Report(
                progress=str(report["progress"]), location=Location(**report["location"])
            )
            if message.get("may_go_on"):
                connection.send(kind="noted")
            if message_type == "waits" and self._needs_reports(message):
                self._waited_seconds = float(message["seconds"])
                self._may_go_on = bool(message.get("may_go_on"))
                self._reports = {member.rank: self._reports[member.rank]}
                self._decide_at = time.monotonic() + _SECONDS_TO_ANSWER
                for member_connection in self._members:
                    member_connection.send(kind="report?")
            elif self._waited_seconds is not None and len(self._reports.keys() | self._ended) == len(self._all):
                self._decide_at = time.monotonic()
        elif message_type == "who?":
            ended_members = self._ranks_ended_first(but=member.rank)
            if ended_members:  # this rank ends because those have ended: ranks that ask later are told of those alone
                self._ended_for_others.add(member.rank)
            connection.send(kind="ended", members=ended_members)

    def _needs_reports(self, message: dict[str, Any]) -> bool:
        """Whether to ask all ranks where they stand, since a rank has waited for too long."""
        if self._verdict is not None:
            return False
        is_asking = self._waited_seconds is not None
        if message.get("may_go_on"):  # one report for all ranks that wait, and another one as much later
            return not is_asking and time.monotonic() - self._slow_report_at >= float(message["seconds"])
        return not is_asking or self._may_go_on

    def _ranks_ended_first(self, *, but: int | None = None) -> list[dict[str, Any]]:
        """The ranks whose scripts have ended by themselves, and not because another's had ended."""
        return [asdict(self._all[rank]) for rank in sorted(self._ended - self._ended_for_others - {but})]

    def _drop(self, connection: Connection, *, silent_host: bool) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._unknown.discard(connection)
        member = self._members.pop(connection, None)
        if member is not None and member.rank not in self._ended and self._verdict is None:
            self._gone.append(member)
            self._is_host_silent = silent_host
            self._decide_at = time.monotonic() + _SECONDS_TO_SETTLE

    def _decide(self) -> None:
        self._decide_at = None
        if self._verdict is not None:
            return
        progress = self._progress()
        if self._gone and progress:  # otherwise nothing trains any more
            self._announce(verdict_of_loss(self._gone, progress, host_is_silent=self._is_host_silent))
        elif self._waited_seconds is not None and self._may_go_on:
            line = describe_slow_wait(list(self._all.values()), self._reports, self._waited_seconds)
            self._waited_seconds = None
            self._may_go_on = False
            self._slow_report_at = time.monotonic()
            if line:
                with suppress(OSError):
                    os.write(2, f"fsdp-core: {line}\n".encode(errors="backslashreplace"))
        elif self._waited_seconds is not None:
            self._announce(verdict_of_hang(list(self._all.values()), self._reports, self._ended, self._waited_seconds))

    def _announce(self, verdict: Verdict) -> None:
        self._verdict = verdict
        for connection in self._members:
            connection.send(kind="verdict", verdict=asdict(verdict))
