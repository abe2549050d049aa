"""Who is said to be lost or behind, and what comes over the watch's connections that is none of it."""

from __future__ import annotations

import atexit
import fcntl
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import _InfiniteBarrier
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from torch._utils import ExceptionWrapper

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.setup_checks import hang_duration
from fsdp_core.testing.refusals import assert_says
from fsdp_core.watch import hub as hubs
from fsdp_core.watch import watcher
from fsdp_core.watch.hub import Hub
from fsdp_core.watch.locations import Location, StandStill, location_of, stacks
from fsdp_core.watch.messages import Connection, connect
from fsdp_core.watch.verdicts import Member, Report, verdict_of_error, verdict_of_hang, verdict_of_loss
from fsdp_core.watch.watcher import Watcher, start_time_of

MEMBERS = [Member(rank=rank, host="a" if rank < 2 else "b", pid=100 + rank) for rank in range(4)]
REDUCES = Location(
    innermost="c10d.py:9 in all_reduce",
    user_line="train.py:3 in fit",
    waits=True,
    collective="gloo:all_reduce",
    sequence=7,
)
LOADS = Location(innermost="queue.py:5 in get", user_line="train.py:8 in rows", waits=False, sequence=7)


def test_an_error_that_says_what_to_do_is_not_answered_by_a_new_start() -> None:
    again = "Start the same command again"
    assert again in verdict_of_error(MEMBERS[1], "ValueError: a bad batch", "at step 3").message
    message = verdict_of_error(
        MEMBERS[1], "ShardingError: the epoch is over", "at step 3", "Give each rank as many batches."
    ).message
    assert "Give each rank as many batches." in message
    assert again not in message


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *((wrong, "is not a duration") for wrong in (0, -1.0, "x", True, math.inf, math.nan, timedelta())),
        (1e-6, "is less than a second: ranks wait in every step"),
        (1e11, "is longer than ranks can wait"),  # torch's nanoseconds end there, and gloo waits at full speed
        (timedelta(days=9999), "is longer than ranks can wait"),
    ],
    ids=str,
)
def test_a_hang_timeout_that_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UnsupportedCapabilityError, match=f"{why}.\nWrite a number of seconds"):
        hang_duration(given)


def reports(*locations: Location | None) -> dict[int, Report]:
    return {
        rank: Report(progress=f"at step {rank}", location=where)
        for rank, where in enumerate(locations)
        if where is not None
    }


BEHIND = replace(REDUCES, sequence=6)
ELSEWHERE = replace(REDUCES, user_line="train.py:4 in log", collective="gloo:barrier")
BEFORE = replace(REDUCES, user_line="train.py:2 in fit")

#: Where ranks stand, and what is said of it.
STANDING: dict[str, tuple[tuple[Location | None, ...], str]] = {
    "one does not wait": (
        (REDUCES, REDUCES, LOADS, REDUCES),
        "rank 2 on b (process 102) is behind at step 2: it stands at train.py:8",
    ),
    "one is silent": ((REDUCES, None, LOADS, REDUCES), "rank 1 on a (process 101) is behind: it does not answer"),
    "one has ended": (
        (REDUCES, REDUCES, REDUCES, None),
        "rank 3 on b (process 103) is behind: it has ended its script",
    ),
    "one is a collective behind": (
        (REDUCES, BEHIND, REDUCES, REDUCES),
        "rank 1 on a (process 101) is behind at step 1: it stands at train.py:3 in fit",
    ),
    "one waits elsewhere": (
        (REDUCES, REDUCES, REDUCES, ELSEWHERE),
        "rank 3 on b (process 103) is behind at step 3: it stands at train.py:4 in log (there c10d.py:9 in all",
    ),
    "two": ((LOADS, LOADS, REDUCES, REDUCES), "rank 0 on a (process 100) is behind"),
    "two ranks that wait, at different places": (
        (REDUCES, BEFORE),
        "at different places. rank 0 on a (process 100) waits at step 0, at train.py:3 in fit (there c10d.py:9 in "
        "all_reduce), and the last collective that it has entered is gloo:all_reduce. rank 1 on a (process 101) "
        "waits at step 1, at train.py:2 in fit",
    ),
    "all at one place": (
        (REDUCES, REDUCES, REDUCES, REDUCES),
        "all at one place. rank 0 on a (process 100), rank 1 on",
    ),
}


@pytest.mark.parametrize("case", STANDING)
def test_the_rank_that_is_behind(case: str) -> None:
    locations, says = STANDING[case]
    ended = (3,) if case == "one has ended" else ()
    verdict = verdict_of_hang(MEMBERS[: len(locations)], reports(*locations), ended, 30.0)
    assert says in verdict.message, verdict.message
    assert "ranks have waited for each other for 30 s" in verdict.message
    assert [one.rank for one in verdict.kill] == ([1] if case == "one is silent" else [])


def test_a_lost_host_is_told_by_its_ranks() -> None:
    message = verdict_of_loss(MEMBERS[2:], "at step 4", host_is_silent=True).message
    assert message.startswith(
        "rank 2 on b (process 102), rank 3 on b (process 103) were lost at step 4: their host has not"
    )
    assert "ckpt_path='last'" in message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hubs, "_SECONDS_TO_SETTLE", 0.05)
    made = Hub(3, lambda: "at step 4")
    yield made
    made.close()


def greet(hub: Hub, rank: int) -> Connection:
    made = connect(["localhost"], hub.port, kind="hello", token=hub.token, member=asdict(MEMBERS[rank]))
    assert made is not None
    return made


def connected() -> tuple[socket.socket, Connection]:
    """Both ends of a connection, a watcher's and the hub's."""
    with socket.create_server(("localhost", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, Connection(server.accept()[0])


def next_of(connection: Connection) -> dict[str, Any]:
    assert select.select([connection], [], [], 30.0)[0], "nothing has come"
    return next(iter(connection.receive()))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "hello", "token": "wrong", "member": {"rank": 1, "host": "a", "pid": 1}}\n',
        b'{"kind": "hello", "member": {}}\n',
        b'{"kind": "verdict", "verdict": {"kind": "lost", "message": "go", "kill": [{"rank": 0, "pid": 1}]}}\n',
        b"[1, 2]\n{}\n",
        b"\xff\xfe\n",
        b"x" * 200_000,
    ],
    ids=["another protocol", "another token", "no token", "a verdict", "no object", "no text", "no end"],
)
def test_what_is_no_rank_is_turned_away(hub: Hub, sent: bytes) -> None:
    rank = greet(hub, 0)
    with socket.create_connection(("localhost", hub.port), timeout=30.0) as stranger:
        try:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass
        except OSError:  # it was turned away before all was sent
            pass
    rank.send(kind="who?")
    assert next_of(rank) == {"kind": "ended", "members": []}, "the ranks were told of a stranger"
    rank.send(kind="bye")
    rank.close()


def test_a_rank_that_is_gone_is_told_to_the_others_and_one_that_says_goodbye_is_not(hub: Hub) -> None:
    first, second, third = (greet(hub, rank) for rank in range(3))
    third.send(kind="bye")
    third.close()
    first.send(kind="who?")
    assert [one["rank"] for one in next_of(first)["members"]] == [2]
    second.close()
    told = next_of(first)["verdict"]
    assert told["kind"] == "lost"
    assert told["message"].startswith("rank 1 on a (process 101) was lost at step 4")
    first.send(kind="bye")


def test_a_rank_that_ends_because_another_has_is_not_called_a_cause(hub: Hub) -> None:
    first, second, third = (greet(hub, rank) for rank in range(3))
    third.send(kind="bye")
    for rank in (second, first):
        rank.send(kind="who?")
        assert [member["rank"] for member in next_of(rank)["members"]] == [2]
    first.send(kind="bye")  # rank 0's, whose process has the hub
    hub.close()
    goodbye = next_of(second)
    assert (goodbye["kind"], [member["rank"] for member in goodbye["members"]]) == ("bye", [2])


def test_ranks_are_asked_where_they_stand_when_one_has_waited_for_too_long(hub: Hub) -> None:
    first, second = greet(hub, 0), greet(hub, 1)
    first.send(kind="waits", seconds=9.0, report=asdict(reports(REDUCES)[0]))
    for connection, where in ((first, REDUCES), (second, LOADS)):
        assert next_of(connection) == {"kind": "report?"}
        connection.send(kind="report", report=asdict(Report(progress="at step 4", location=where)))
    for connection in (first, second):
        assert "rank 1 on a (process 101) is behind at step 4" in next_of(connection)["verdict"]["message"]
        connection.send(kind="bye")


PREPARES = replace(REDUCES, innermost="distributed.py:8 in __exit__, for prepare_data()", awaited="prepare_data()")


def test_ranks_may_wait_longer_for_what_one_does_alone(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = greet(hub, 0), greet(hub, 1)

    def waits(seconds: float, *, may_go_on: bool) -> None:
        report = asdict(reports(LOADS, PREPARES)[1])
        second.send(kind="waits", seconds=seconds, may_go_on=may_go_on, report=report)
        kinds = [message["kind"] for message in iter(lambda: next_of(second), {"kind": "report?"})]
        assert (kinds, next_of(first)) == (["noted"] if may_go_on else [], {"kind": "report?"})
        first.send(kind="report", report=asdict(reports(LOADS)[0]))
        second.send(kind="report", report=report)

    waits(9.0, may_go_on=True)
    while "fsdp-core:" not in (told := capfd.readouterr().err):  # written once the hub has both reports
        pass
    assert "rank 1 on a (process 101) has waited for 9 s for prepare_data(): rank 0 on a (process 100) stands" in told
    assert_says(told, "train.py:8 in rows", "The run ends if that takes 108 s")
    waits(108.0, may_go_on=False)
    verdict = next_of(first)["verdict"]
    assert verdict["kind"] == "hang"
    assert_says(verdict["message"], "for 108 s. rank 0 on a (process 100) is behind", "for prepare_data()")
    assert "12 times hang_timeout" in verdict["message"]
    for connection in (first, second):
        connection.send(kind="bye")


def _prepares() -> None:
    trainer = SimpleNamespace(local_rank=1, node_rank=0, datamodule=None, lightning_module=Prepares())
    _DataConnector.prepare_data(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]


def _goes_second(local: bool) -> None:
    with Fabric.rank_zero_first(SimpleNamespace(local_rank=1, global_rank=1), local=local):  # type: ignore[arg-type]
        pass


class Prepares(LightningModule):
    def prepare_data(self) -> None:
        raise AssertionError("only rank 0 prepares")


@pytest.mark.parametrize(
    ("call", "awaited"),
    [
        (_prepares, "prepare_data()"),
        (partial(_goes_second, local=False), "rank_zero_first()"),
        (partial(_goes_second, local=True), "rank_zero_first()"),  # the first of the host
    ],
    ids=["prepare_data", "rank_zero_first", "the host's first"],
)
def test_a_rank_that_waits_in_lightnings_barrier_says_so(
    call: Callable[[], None], awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First when it has waited for ``hang_timeout``, and that it can't go on when it has for twelve times that."""
    held = threading.Lock()
    held.acquire()

    def set_up(barrier: Any) -> None:
        barrier.group, barrier.barrier = None, held.acquire  # of C, as the barrier of a process group

    monkeypatch.setattr(_InfiniteBarrier, "__init__", set_up)
    monkeypatch.setattr(watcher, "_is_group_current", lambda: True)
    made: list[Watcher] = []
    ours, other = connected()

    def train() -> None:
        made.append(
            Watcher(Connection(ours), MEMBERS[1], MEMBERS[0], hang_timeout=0.2, progress=lambda: "at step 0", hub=None)
        )
        call()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        first = next_of(other)
        assert (first["kind"], first["may_go_on"], first["seconds"]) == ("waits", True, 0.2)
        assert first["report"]["location"]["awaited"] == awaited
        assert first["report"]["location"]["innermost"].endswith(f", for {awaited}")
        other.send(kind="noted")
        second = next_of(other)
        assert (second["kind"], second["may_go_on"], second["seconds"]) == ("waits", False, pytest.approx(2.4))
    finally:
        made[0].leave()
        while thread.is_alive():  # it waits there once or twice
            if held.locked():
                held.release()
            thread.join(0.01)
        other.close()


def in_worker(error: Exception) -> Exception:
    """The exception as a loader raises that one of its workers has met."""
    try:
        raise error
    except Exception:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(type(error)) as caught:
        wrapped.reraise()
    return caught.value


@pytest.mark.parametrize("where", ["the script", "a loader's worker"])
def test_the_traceback_of_an_exception_comes_before_what_is_made_of_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = connected()
    told_before: list[bool] = []
    monkeypatch.setattr(watcher, "_installed", False)
    monkeypatch.setattr(sys, "excepthook", lambda *_: told_before.append(bool(select.select([other], [], [], 0.2)[0])))
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    watching = Watcher(
        Connection(ours), MEMBERS[1], MEMBERS[0], hang_timeout=60.0, progress=lambda: "at step 1", hub=None
    )
    monkeypatch.setattr(watcher, "_watching", watching)
    try:
        watcher._install_hooks()
        error = ValueError("a bad batch")
        error = error if where == "the script" else in_worker(error)
        sys.excepthook(type(error), error, None)
        told = next_of(other)
        assert told["kind"] == "raised"
        assert told["error"] == "ValueError: a bad batch" + (
            "" if where == "the script" else ", in DataLoader worker process 0"
        )
        assert told_before == [False]
    finally:
        watching.leave()
        other.close()


@pytest.mark.parametrize("text", ["Connection closed by peer", "Rank 1 successfully reached monitoredBarrier, but"])
def test_an_exception_that_the_loss_of_another_rank_causes_is_no_cause(text: str) -> None:
    assert watcher._comes_from_loss(RuntimeError(text))
    assert not watcher._comes_from_loss(ValueError(text))


def test_a_process_with_many_open_files_is_watched_like_any_other() -> None:
    """``select()`` takes no file numbers above 1,023: rank 0 would be taken for lost."""
    ours, other = connected()
    held = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1500))
    ours.close()
    watcher = Watcher(
        Connection(held), MEMBERS[1], MEMBERS[0], hang_timeout=60.0, progress=lambda: "at step 1", hub=None
    )
    try:
        other.send(kind="report?")
        assert [message["kind"] for message in other.receive()] == ["report"]
        assert watcher.verdict is None
    finally:
        watcher.leave()
        other.close()


def test_where_a_thread_stands_and_for_how_long() -> None:
    begun, may_end, moves_on = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        moves_on.wait()
        begun.set()
        may_end.wait()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    assert begun.wait(30.0)
    begun.clear()
    assert thread.ident is not None
    while "in wait" not in location_of(thread.ident).innermost:
        pass
    standing = StandStill(thread.ident)
    assert standing.seconds() < 1e-3 <= max(standing.seconds() for _ in range(20_000))
    where = location_of(thread.ident)
    assert f"{__file__}:" in where.user_line
    assert "in work" in where.user_line
    assert not where.waits
    assert any(line == "Thread worker, innermost call last:" for line in stacks().splitlines())
    assert "Thread worker, innermost call last:" not in stacks([thread.ident]).splitlines()
    moves_on.set()
    assert begun.wait(30.0)
    assert standing.seconds() < 1e-3
    may_end.set()
    thread.join(30.0)
    assert json.dumps(asdict(location_of(thread.ident))), "a thread that has ended has no place"


def test_a_process_is_told_from_another_one_of_its_number(tmp_path: Path) -> None:
    assert start_time_of(os.getpid()) == start_time_of(os.getpid()) != ""
    assert start_time_of(2**22 + 1) == ""
    script = tmp_path / "train-my-modelé"  # the kernel keeps 15 bytes of a name, which is amid the last letter
    script.write_text("#!/bin/sh\nread _\n")
    script.chmod(0o700)
    with subprocess.Popen([script], stdin=subprocess.PIPE) as process:
        assert start_time_of(process.pid).isdigit()
        process.communicate(b"\n")
