"""Exchange of objects between ranks on the host, without compiling or running a graph on the device.

Metrics, decisions and objects are exchanged this way (shared memory between threads, a store between processes). On
the device each would be a program to compile. Only values that belong to a step, such as the norm for gradient
clipping, are reduced in its graph.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from fsdp_core import ShardingError
from fsdp_xla.ranks.barrier import RankLostError, ThreadBarrier
from fsdp_xla.ranks.messages import from_bytes, to_bytes

__all__ = ["Communicator", "RankLostError", "StoreCommunicator", "ThreadCommunicator"]


class Communicator(ABC):
    """Exchange of values between the ranks of one run.

    Attributes:
        world_size: The number of ranks.
    """

    world_size: int

    @abstractmethod
    def all_gather_object(self, rank: int, value: Any) -> list[Any]:
        """Return the list of all ranks' values, by rank. All ranks must call it.

        Args:
            rank: The caller.
            value: Its value; picklable.

        Raises:
            RankLostError: A rank has failed, or did not arrive in time.
        """

    def gather_object(self, rank: int, value: Any, dst: int) -> list[Any] | None:
        """Return the list of all ranks' values on rank ``dst``, and ``None`` on the others. All ranks must call it.

        Args:
            rank: The caller.
            value: Its value; picklable.
            dst: The rank that gets the values.

        Raises:
            RankLostError: A rank has failed, or did not arrive in time.
        """
        gathered = self.all_gather_object(rank, value)
        return gathered if rank == dst else None

    def total(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Add up whole numbers over the ranks, each by itself. All ranks must call it.

        Args:
            rank: The caller.
            numbers: As many on every rank.

        Raises:
            RankLostError: A rank has failed, or did not arrive in time.
        """
        numbers_by_rank = self.all_gather_object(rank, list(numbers))
        return [sum(column) for column in zip(*numbers_by_rank, strict=True)]

    def building(self, rank: int) -> AbstractContextManager[None]:
        """Context in which a rank builds its model."""
        return nullcontext()

    def claim(self, rank: int, module: nn.Module) -> None:
        """Record that a rank shards a module, which ranks that are threads must not share.

        Raises:
            ShardingError: Another rank shards it too.
        """

    @abstractmethod
    def duplicate(self, rank: int) -> Communicator:
        """Create another communicator of the same ranks, for another thread of each. All ranks must call it."""


class ThreadCommunicator(Communicator):
    """The ranks are threads of one process.

    Args:
        world_size: The number of ranks.
        timeout: How long a rank waits for the others.

    Attributes:
        barrier: The barrier of its ranks.

    Example:
        >>> ThreadCommunicator(1).all_gather_object(0, "hello")
        ['hello']
    """

    def __init__(self, world_size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.world_size = world_size
        self.barrier = ThreadBarrier(world_size, timeout)
        self._messages: list[Any] = [None] * world_size
        self._duplicates: list[ThreadCommunicator] = []
        self._lock = threading.RLock()
        self._random_states: list[Tensor] = []
        self._build_counts = [0] * world_size
        self._claimed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def all_gather_object(self, rank: int, value: Any) -> list[Any]:
        # Sent as bytes, so that every rank gets copies of its own, as from another process.
        self._messages[rank] = to_bytes(value)
        self.barrier.wait(rank, _EXCHANGES)
        gathered = [from_bytes(message) for message in self._messages]
        self.barrier.wait(rank, _EXCHANGES)
        return gathered

    def gather_object(self, rank: int, value: Any, dst: int) -> list[Any] | None:
        self._messages[rank] = to_bytes(value)
        self.barrier.wait(rank, _EXCHANGES)
        gathered = [from_bytes(message) for message in self._messages] if rank == dst else None
        self.barrier.wait(rank, _EXCHANGES)
        return gathered

    def duplicate(self, rank: int) -> Communicator:
        def create() -> None:
            self._duplicates.append(ThreadCommunicator(self.world_size, self.barrier.timeout))

        self.barrier.wait(rank, _EXCHANGES, create)
        created = self._duplicates[-1]
        self.barrier.wait(rank, _EXCHANGES)
        return created

    @contextmanager
    def building(self, rank: int) -> Iterator[None]:
        """Context for one rank at a time, in which each rank gets torch's random generator in the same state.

        The generator is shared by the process, and so is the state of torch's ``wrap``.

        Raises:
            RankLostError: A rank waits for the others inside the context, while they wait for their turn to build.
        """
        with self._lock:
            rank_before, self.barrier.building = self.barrier.building, rank
            build_number = self._build_counts[rank]
            self._build_counts[rank] += 1
            if build_number == len(self._random_states):
                self._random_states.append(torch.get_rng_state())
            torch.set_rng_state(self._random_states[build_number])
            try:
                yield
            finally:
                self.barrier.building = rank_before

    def claim(self, rank: int, module: nn.Module) -> None:
        with self._lock:
            for submodule in module.modules():
                owner = self._claimed.setdefault(submodule, rank)
                if owner != rank:
                    raise ShardingError(
                        f"{type(module).__name__} is set up by rank {rank} and by rank {owner}: on the CPU ranks are "
                        "threads, which share objects that the function did not create.\n"
                        "Build the model in the function that fabric.launch() is given, or pass it: "
                        "fabric.launch(train, model) gives each rank a copy."
                    )

    def abort(self) -> None:
        """Make every rank that waits, now or later, raise an error."""
        self.barrier.abort()
        for duplicate in self._duplicates:
            duplicate.abort()


_EXCHANGES = "exchanges values (barrier, broadcast, reduction, checkpoint)"


@contextmanager
def _explain_lost_rank(rank: int) -> Iterator[None]:
    """A context in which a rank waits for others in a store. It turns the store's error into ours."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            f"another rank did not arrive where rank {rank} waits: {error}\nSee the other rank's error."
        ) from error


class StoreCommunicator(Communicator):
    """The ranks are processes, which share one of torch's stores.

    Args:
        store: The store.
        world_size: The number of ranks.
        host: The store of which ``store`` is a clone. It is kept alive, because it may be the server.
    """

    def __init__(self, store: Store, world_size: int, host: Store | None = None) -> None:
        self.world_size = world_size
        self._store: Any = store  # its annotations allow strings, not bytes
        self._host = host
        self._count = 0
        self._duplicate_count = 0
        self._earlier_keys: list[str] = []

    def all_gather_object(self, rank: int, value: Any) -> list[Any]:
        self._count += 1
        self._store.set(f"{self._count}/{rank}", to_bytes(value))
        with _explain_lost_rank(rank):
            gathered = [
                from_bytes(self._store.get(f"{self._count}/{source_rank}")) for source_rank in range(self.world_size)
            ]
        self._delete_earlier_keys(f"{self._count}/{rank}")
        return gathered

    def _delete_earlier_keys(self, *keys: str) -> None:
        """Delete this rank's keys of earlier exchanges, which all ranks have read: they have all arrived at this one.

        Args:
            *keys: The keys that it has set in this exchange, which others may still read.
        """
        for key in self._earlier_keys:
            self._store.delete_key(key)
        self._earlier_keys = list(keys)

    def gather_object(self, rank: int, value: Any, dst: int) -> list[Any] | None:
        self._count += 1
        if rank != dst:
            self._store.set(f"{self._count}/{rank}", to_bytes(value))
            return None
        gathered = []
        for source_rank in range(self.world_size):
            if source_rank == rank:
                gathered.append(value)
                continue
            key = f"{self._count}/{source_rank}"
            with _explain_lost_rank(rank):
                gathered.append(from_bytes(self._store.get(key)))
            self._store.delete_key(key)
        return gathered

    def total(self, rank: int, numbers: Sequence[int]) -> list[int]:
        self._count += 1
        keys = [f"{self._count}/sum {index}" for index in range(len(numbers))]
        arrived, complete = f"{self._count}/arrived", f"{self._count}/complete"
        for key, number in zip(keys, numbers, strict=True):
            self._store.add(key, number)
        if self._store.add(arrived, 1) == self.world_size:
            self._store.set(complete, "")
        with _explain_lost_rank(rank):
            self._store.get(complete)
        sums = [self._store.add(key, 0) for key in keys]
        self._delete_earlier_keys(*([*keys, arrived, complete] if rank == 0 else []))
        return sums

    def duplicate(self, rank: int) -> Communicator:
        # With a connection of its own: a thread that waits blocks the connection, and this rank's other thread could
        # not send the value for which the other ranks wait.
        self._duplicate_count += 1
        separate_store = PrefixStore(f"{self._duplicate_count}", self._store.clone())
        return StoreCommunicator(separate_store, self.world_size, self._store)
