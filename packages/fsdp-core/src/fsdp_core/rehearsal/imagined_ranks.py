"""One process plays a rank of many, and imagines its peers: they do what it does, with the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pickle import Pickler
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fsdp_core.errors import ShardingError
from fsdp_core.mesh import MeshAxis
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.torch_private.dtensors import forget_meshes
from fsdp_core.torch_private.fake_tensors import register_fake_backend

__all__ = ["Exchange", "ImaginedEnvironment", "ImaginedRuntime", "imagined_world"]


@contextmanager
def imagined_world(rank: int, world_size: int) -> Iterator[None]:
    """A context with a process group of imagined ranks, in which no collective communicates anything.

    Args:
        rank: The rank that this process plays.
        world_size: The number of ranks.

    Raises:
        ShardingError: This process has a process group already.
    """
    if dist.is_initialized():
        raise ShardingError(
            "this process has a process group already, and a rehearsal needs one of its own.\n"
            "Rehearse in a process that has not called torch.distributed.init_process_group(), or after "
            "torch.distributed.destroy_process_group()."
        )
    register_fake_backend()
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    forget_meshes(torch.device("cpu"))  # as after any group is made: DTensor's caches may know another rank of as many
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Exchange:
    """Objects that ranks give each other in host memory.

    Attributes:
        nbytes: The bytes of one rank's object.
        ranks: The number of ranks whose objects a rank receives.
        is_by_all: Whether all ranks receive them, and not only one.
    """

    nbytes: int
    ranks: int
    is_by_all: bool


class ImaginedRuntime(ProcessGroupRuntime):
    """A rank whose peers say what it says: objects that are exchanged are its own.

    Attributes:
        exchanges: What ranks have gathered, in order.
        answers_for_first: Whether the first rank, which gathers objects and broadcasts what follows from them, is
            imagined too: this rank then gathers them in its place.
    """

    is_rehearsed = True

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []
        self.answers_for_first = False

    def along(self, *axes: MeshAxis) -> Runtime:
        if self.mesh.size(axes) == self.world_size:
            return self
        key = self.mesh, tuple(axis for axis in axes if self.mesh.size((axis,)) > 1)
        if key not in self._along:
            peers = ImaginedRuntime()
            peers.exchanges = self.exchanges
            peers.local_rank, peers.device = self.local_rank, self.device
            peers.rank, peers.world_size = self.mesh.coordinate(self.rank, axes), self.mesh.size(axes)
            peers._group = dist.new_group(list(self.mesh.peers(self.rank, axes)))
            self._along[key] = peers
        return self._along[key]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def gather_objects(self, obj: Any) -> list[Any]:
        self._note(obj, is_by_all=True)
        return [obj] * self.world_size

    def gather_objects_to(self, obj: Any, dst: int = 0) -> list[Any] | None:
        self._note(obj, is_by_all=False)
        return [obj] * self.world_size if self.rank == dst or self.answers_for_first else None

    def _note(self, obj: Any, *, is_by_all: bool) -> None:
        message = BytesIO()
        Pickler(message).dump(obj)
        self.exchanges.append(Exchange(message.tell(), self.world_size, is_by_all))

    def total(self, numbers: Sequence[int]) -> list[int]:
        return [int(number) * self.world_size for number in numbers]

    def rendezvous(self, operation: str) -> None:
        """Nothing to do: the peers have come."""

    def barrier(self) -> None:
        """Nothing to do: the peers have come."""

    def side_channel(self) -> Runtime:
        return self

    def stop(self) -> None:
        """Nothing to do: the process group is that of :func:`imagined_world`."""


class ImaginedEnvironment(ClusterEnvironment):
    """Tells Lightning that this process is one of many, which something else has started.

    Args:
        rank: The rank that it plays.
        world_size: The number of ranks, on one host.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 1

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Nothing to do: the number is known."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing to do: the number is known."""

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0
