"""Ranks that live in one process: what the kit does for libraries whose ranks are threads, or one controller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from fsdp_core.testing import RankError
from fsdp_core.testing.launching.calls import Answer, Failure, answer_of
from fsdp_core.testing.launching.forking import StartMethod
from fsdp_core.testing.launching.one_process_ranks import OneProcessRanks
from fsdp_core.testing.launching.process_ranks import RankKind
from fsdp_core.testing.launching.rank_context import RankContext, rank_context, set_rank_context
from fsdp_core.testing.refusals import refusal
from test_ranks import assert_begins_with_cause, assert_names_what_became_of_ranks

if TYPE_CHECKING:
    from test_conformance_kit import Site

_rank = threading.local()


class OnThreads(RankContext):
    @property
    def rank(self) -> int:
        return int(_rank.index)


def on_threads(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Answer]:
    os.environ.setdefault("SET_BY_THE_LIBRARY", "once")
    set_rank_context(OnThreads())
    answers: dict[int, Answer] = {}

    def rank(index: int) -> None:
        _rank.index = index
        answers[index] = answer_of(lambda: function(*arguments))

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(world_size)]


class ThreadRanks(OneProcessRanks):
    kind: ClassVar[RankKind] = "threads"
    caller: ClassVar[str] = "test_one_process_ranks:on_threads"
    keeps: ClassVar[tuple[str, ...]] = ("SET_BY_THE_LIBRARY",)
    start_method: ClassVar[StartMethod] = "forkserver"

    def environment(self, world_size: int) -> dict[str, str]:
        return {"LIBRARY_DEVICES": str(world_size)}

    def follows_from_another(self, failure: Failure) -> bool:
        return "LostError" in failure.summary


class LostError(Exception):
    """Another rank has failed."""


@dataclass
class Seen:
    rank: int
    pid: int
    devices: str
    left_behind: str | None
    kept: str | None


def look() -> Seen:
    variables = [os.environ.get(name) for name in ("LEFT_BEHIND", "SET_BY_THE_LIBRARY")]
    seen = Seen(rank_context().rank, os.getpid(), os.environ["LIBRARY_DEVICES"], *variables)
    os.environ["LEFT_BEHIND"] = "1"
    return seen


def fail_on(rank: int) -> None:
    if rank_context().rank == rank:
        raise ValueError("weight differs")
    raise LostError("see the other rank's error")


class SpawnedThreadRanks(ThreadRanks):
    start_method: ClassVar[StartMethod] = "spawn"


@pytest.mark.parametrize(("kind", "last"), [(ThreadRanks, 3), (SpawnedThreadRanks, 2)])  # to spawn one takes seconds
def test_every_rank_calls_in_a_process_that_lives_on_and_knows_its_number_of_devices(
    kind: type[ThreadRanks], last: int
) -> None:
    with kind() as ranks:
        calls = [ranks.run(number, look) for number in (2, 2, last)]
    assert [[one.rank for one in call] for call in calls] == [[0, 1], [0, 1], list(range(last))]
    assert [{one.devices for one in call} for call in calls] == [{"2"}, {"2"}, {f"{last}"}]
    assert calls[0][0].pid == calls[1][0].pid
    assert (calls[2][0].pid == calls[0][0].pid) == (last == 2)
    assert all(one.pid != os.getpid() and one.kept == "once" for call in calls for one in call)


def test_variables_are_taken_back_but_for_the_librarys_own() -> None:
    with ThreadRanks() as ranks:
        ranks.run(1, look)
        (again,) = ranks.run(1, look)
    assert (again.left_behind, again.kept) == (None, "once")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_begins_with_the_cause_and_ends_the_process(rank: int) -> None:
    with ThreadRanks() as ranks:
        before = ranks.run(2, look)[0].pid
        message = refusal(RankError, lambda: ranks.run(2, fail_on, rank))
        assert_begins_with_cause(message, "ValueError: weight differs", rank)
        assert ranks.run(2, look)[0].pid != before


def test_what_becomes_of_a_process_that_answers_nothing() -> None:
    assert_names_what_became_of_ranks(ThreadRanks)


SUITE = """
    from fsdp_core.testing.suite.base_class import Clauses, on_ranks
    from test_one_process_ranks import ThreadRanks, look


    class Suite(Clauses):
        def test_runs(self, ranks):
            assert [one.devices for one in ranks.run(2, look)] == ["2", "2"]

        @on_ranks("processes", "one controller")
        def test_of_processes(self, ranks):
            raise AssertionError("must not run")

        @on_ranks("threads")
        def test_of_threads(self, ranks):
            assert ranks.kind == "threads"
"""


def test_a_class_chooses_its_ranks_and_what_is_about_others_does_not_apply(site: Site) -> None:
    from test_conformance_kit import TINY, pytest_on

    site.provide("tiny-plugin", TINY)
    (site.path / "suite_of_tests.py").write_text("\n".join(line[4:] for line in SUITE.splitlines()))
    source = "class TestTiny(Suite):\n    strategy = 'tiny'\n    rank_pool = ThreadRanks\n"
    path = f"--rootdir={site.path}", f"-opythonpath={os.path.dirname(__file__)}"
    done = pytest_on(site, source, *path)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout
    assert "about ranks that are processes or one controller, and those of 'tiny' are threads here" in done.stdout
