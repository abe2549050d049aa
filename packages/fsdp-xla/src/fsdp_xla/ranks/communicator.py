"""Exchange of objects between ranks on the host, without compiling or running a graph on the device.

Metrics, decisions and objects are exchanged this way (shared memory between threads, a store between processes). On
the device each would be a program to compile. Only values that belong to a step, such as the norm for gradient
clipping, are reduced in its graph.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
        self._slots: list[Any] = [None] * world_size
        self._others: list[ThreadCommunicator] = []
        self._lock = threading.RLock()
        self._random_states: list[Tensor] = []
        self._built = [0] * world_size
        self._claimed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def all_gather_object(self, rank: int, value: Any) -> list[Any]:
        # every rank gets copies of its own, as from another process
        self._slots[rank] = to_bytes(value)
        self.barrier.wait(rank, _EXCHANGES)
        gathered = [from_bytes(slot) for slot in self._slots]
        self.barrier.wait(rank, _EXCHANGES)
        return gathered

    def duplicate(self, rank: int) -> Communicator:
        def create() -> None:
            self._others.append(ThreadCommunicator(self.world_size, self.barrier.timeout))

        self.barrier.wait(rank, _EXCHANGES, create)
        created = self._others[-1]
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
            outer, self.barrier.building = self.barrier.building, rank
            turn = self._built[rank]
            self._built[rank] += 1
            if turn == len(self._random_states):
                self._random_states.append(torch.get_rng_state())
            torch.set_rng_state(self._random_states[turn])
            try:
                yield
            finally:
                self.barrier.building = outer

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
        """Raise in every rank that waits, now or later."""
        self.barrier.abort()
        for other in self._others:
            other.abort()


_EXCHANGES = "exchanges values (barrier, broadcast, reduction, checkpoint)"


class StoreCommunicator(Communicator):
    """The ranks are processes, which share one of torch's stores.

    Args:
        store: The store.
        world_size: The number of ranks.
        host: A store to keep alive: the original of the clone ``store``, which may be the server.
    """

    def __init__(self, store: Store, world_size: int, host: Store | None = None) -> None:
        self.world_size = world_size
        self._store: Any = store  # its annotations allow strings, not bytes
        self._host = host
        self._count = 0
        self._made = 0

    def all_gather_object(self, rank: int, value: Any) -> list[Any]:
        self._count += 1
        self._store.set(f"{self._count}/{rank}", to_bytes(value))
        try:
            gathered = [from_bytes(self._store.get(f"{self._count}/{r}")) for r in range(self.world_size)]
        except RuntimeError as error:
            raise RankLostError(
                f"another rank did not arrive where rank {rank} waits: {error}\nSee the other rank's error."
            ) from error
        # every rank has read the exchange before last by now, so that its values are no longer needed
        self._store.delete_key(f"{self._count - 2}/{rank}")
        return gathered

    def duplicate(self, rank: int) -> Communicator:
        # a separate connection: a wait blocks its connection, so that a value from another thread of this rank, for
        # which the others wait, would not get through
        self._made += 1
        separate = PrefixStore(f"{self._made}", self._store.clone())
        return StoreCommunicator(separate, self.world_size, self._store)
