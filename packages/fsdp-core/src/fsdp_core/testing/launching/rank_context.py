"""What the suite's functions need to know about the rank that they run on, for any kind of rank."""

from __future__ import annotations

import os
from typing import ClassVar

import torch
from torch import Tensor

from fsdp_core.gradients.clipping import local_tensor

__all__ = ["RankContext", "rank_context", "set_rank_context"]


class RankContext:
    """A rank in its own process, as ``torchrun`` starts it. For other ranks, a backend provides a subclass.

    Attributes:
        own_generators: Whether this rank has its own Python, numpy and torch CPU random-number generators.
    """

    own_generators: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """The rank; 0 in a process that is not a rank."""
        return int(os.environ.get("RANK", 0))

    def shares(self, world_size: int) -> int:
        """The number of shares that a batch is divided into before ranks get it, for a given number of ranks."""
        return world_size

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor in host memory over all ranks. All ranks must call it."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor)
            tensor /= torch.distributed.get_world_size()
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, sharing memory with it."""
        return local_tensor(tensor)

    def local_bytes(self, tensor: Tensor) -> int:
        """The bytes of memory of this rank's part of a tensor, or of the tensor that it is a view of."""
        return self.local(tensor).untyped_storage().nbytes()

    def settle(self) -> None:
        """Compute what the library has only recorded so far, so that each rank can read values by itself.

        All ranks must call it.
        """

    def local_numel(self, tensor: Tensor) -> int:
        """The number of elements of this rank's part of a tensor, including the library's padding."""
        return self.local(tensor).numel()


_context = RankContext()


def rank_context() -> RankContext:
    """Return the context of the calling rank."""
    return _context


def set_rank_context(ranks: RankContext) -> None:
    """Set the context of this process's ranks. Called once, before the suite's first function.

    Args:
        ranks: The context. If ranks are threads, its members must answer for the thread that calls them.
    """
    global _context
    _context = ranks
