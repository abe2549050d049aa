"""Ranks that exchange objects on the host."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from fsdp_xla.ranks.barrier import ThreadBarrier
from fsdp_xla.ranks.communicator import Communicator, RankLostError, StoreCommunicator, ThreadCommunicator

RANKS = 3
SOON = timedelta(seconds=2)
LATE = timedelta(minutes=2)


def of_threads(timeout: timedelta) -> list[Communicator]:
    return [ThreadCommunicator(RANKS, timeout)] * RANKS


def of_processes(timeout: timedelta) -> list[Communicator]:
    """As processes have it: a client of the store for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    main = TCPStore("127.0.0.1", port, RANKS, is_master=True, timeout=LATE, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", port, RANKS, is_master=False, timeout=LATE) for _ in range(RANKS - 1)]
    stores = [main, *others]
    for store in stores:
        store.set_timeout(timeout)
    return [StoreCommunicator(store, RANKS) for store in stores]


def on_all(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(function, range(RANKS)))


def until(condition: Callable[[], Any]) -> None:
    """Return when it holds."""
    end = time.monotonic() + LATE.total_seconds()
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.001)


def event_of_waiting(communicator: Any, rank: int) -> threading.Event:
    """Is set when a rank has brought what it exchanges, and begins to wait for the others'."""
    begun = threading.Event()
    if isinstance(communicator, ThreadCommunicator):
        wait = communicator.barrier.wait

        def wait_and_tell(*args: Any) -> None:
            begun.set()
            wait(*args)

        communicator.barrier.wait = wait_and_tell  # type: ignore[method-assign]
        return begun

    class Store:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> Any:
            if not key.endswith(f"/{rank}"):
                begun.set()
            return store.get(key)

    store, communicator._store = communicator._store, Store()
    return begun


KINDS = [of_threads, of_processes]


@pytest.fixture(params=KINDS)
def communicators(request: pytest.FixtureRequest) -> list[Communicator]:
    return list(request.param(LATE))


def test_every_rank_gets_what_all_have_brought(communicators: list[Communicator]) -> None:
    def talk(rank: int) -> list[Any]:
        return [communicators[rank].all_gather_object(rank, (turn, rank, torch.tensor([rank]))) for turn in range(20)]

    for told in on_all(talk):
        for turn, of_turn in enumerate(told):
            assert [(t, r, x.item()) for t, r, x in of_turn] == [(turn, rank, rank) for rank in range(RANKS)]


def test_one_gets_what_all_have_brought_and_all_get_sums(communicators: list[Communicator]) -> None:
    """Ranks that wait for nobody go on, in between exchanges in which all wait for all."""

    def talk(rank: int) -> list[Any]:
        told: list[Any] = []
        for turn in range(20):
            told.append(communicators[rank].gather_object(rank, (turn, rank), turn % RANKS))
            told.append(communicators[rank].gather_object(rank, torch.tensor([rank]), 1))
            told.append(communicators[rank].total(rank, [rank, -turn, 2**40]))
            told.append(communicators[rank].all_gather_object(rank, turn * rank))
            told.append(communicators[rank].total(rank, []))
        return told

    for rank, told in enumerate(on_all(talk)):
        for turn in range(20):
            first, tensors, sums, all_of_them, nothing = told[5 * turn : 5 * turn + 5]
            here = rank == turn % RANKS
            assert first == ([(turn, other) for other in range(RANKS)] if here else None)
            assert tensors is None if rank != 1 else [int(one) for one in tensors] == [0, 1, 2]
            assert sums == [3, -3 * turn, 3 * 2**40]
            assert all_of_them == [0, turn, 2 * turn]
            assert nothing == []


def test_a_store_keeps_nothing_of_earlier_exchanges() -> None:
    communicators = of_processes(LATE)

    def talk(rank: int) -> None:
        for _ in range(30):
            communicators[rank].gather_object(rank, rank, 0)
            communicators[rank].total(rank, [rank])
            communicators[rank].all_gather_object(rank, rank)

    on_all(talk)
    store: Any = communicators[0]._store  # type: ignore[attr-defined]
    assert store.num_keys() < 20


def test_each_gets_copies_of_its_own(communicators: list[Communicator]) -> None:
    def talk(rank: int) -> int:
        shared = communicators[rank].all_gather_object(rank, [rank])[0]
        shared.append(rank)
        return len(shared)

    assert on_all(talk) == [2] * RANKS


def test_a_duplicate_is_apart(communicators: list[Communicator]) -> None:
    def talk(rank: int) -> tuple[list[Any], list[Any]]:
        beside = communicators[rank].duplicate(rank)
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(beside.all_gather_object, rank, f"beside {rank}")
            here = communicators[rank].all_gather_object(rank, f"here {rank}")
            return here, later.result()

    for here, beside in on_all(talk):
        assert here == [f"here {rank}" for rank in range(RANKS)]
        assert beside == [f"beside {rank}" for rank in range(RANKS)]


def test_a_wait_does_not_block_the_duplicate_of_its_rank(communicators: list[Communicator]) -> None:
    """As a save that is written beside training, while a rank waits for the next step's values."""
    beside_is_over = threading.Barrier(RANKS, timeout=LATE.total_seconds())

    def talk(rank: int) -> tuple[list[Any], list[Any]]:
        beside = communicators[rank].duplicate(rank)
        with ThreadPoolExecutor(1) as thread:
            if rank == 0:
                begun = event_of_waiting(communicators[rank], rank)
                waits = thread.submit(communicators[rank].all_gather_object, rank, f"here {rank}")
                assert begun.wait(LATE.total_seconds())
            told = beside.all_gather_object(rank, f"beside {rank}")
            beside_is_over.wait()
            return told, waits.result() if rank == 0 else communicators[rank].all_gather_object(rank, f"here {rank}")

    for beside, here in on_all(talk):
        assert beside == [f"beside {rank}" for rank in range(RANKS)]
        assert here == [f"here {rank}" for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_rank_that_does_not_come_is_told(kind: Callable[[timedelta], list[Communicator]]) -> None:
    communicators = kind(SOON)

    def talk(rank: int) -> str:
        if rank == 0:
            return "did not come"
        with pytest.raises(RankLostError, match="See the other rank's error"):
            communicators[rank].all_gather_object(rank, rank)
        return "told"

    assert on_all(talk) == ["did not come", "told", "told"]


def test_an_aborted_communicator_raises_at_once() -> None:
    communicator = ThreadCommunicator(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(communicator.all_gather_object, 0, None)
        until(lambda: communicator.barrier._waiting)
        communicator.abort()
        with pytest.raises(RankLostError, match="another rank has failed"):
            waits.result(10.0)


def test_ranks_that_are_threads_build_from_the_same_random_state() -> None:
    communicator = ThreadCommunicator(RANKS)

    def build(rank: int) -> list[float]:
        drawn = []
        for _ in range(3):
            with communicator.building(rank):
                drawn.append(torch.rand(()).item())
        return drawn

    torch.manual_seed(0)
    first, *others = on_all(build)
    assert others == [first, first]
    assert len(set(first)) == 3


def test_a_rank_that_waits_is_told_of_one_that_has_ended() -> None:
    communicator = ThreadBarrier(2, LATE)

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(communicator.wait, 0, "exchanges values")
        until(lambda: communicator._waiting)
        communicator.leave(1)
        with pytest.raises(RankLostError, match="rank 1 has ended"):
            waits.result(10.0)
    assert communicator.broken
