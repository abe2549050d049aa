"""What the functions of the suite ask about the rank that they run on, whatever a library's ranks are."""

from __future__ import annotations

import os
from typing import ClassVar

import torch
from torch import Tensor

from fsdp_core.gradients.clipping import local_tensor

__all__ = ["Here", "here", "stand_on"]


class Here:
    """A rank that is a process of its own, as ``torchrun`` starts it. For other ranks, a backend brings a subclass.

    Attributes:
        own_generators: Whether the random generators of Python, numpy and torch's CPU are this rank's alone.
    """

    own_generators: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """Which one this is; 0 in a process that is no rank."""
        return int(os.environ.get("RANK", 0))

    def shares(self, world_size: int) -> int:
        """Into how many shares a batch is divided before ranks are given it, where there are so many ranks."""
        return world_size

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks of a tensor in host memory. All of them must call it."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor)
            tensor /= torch.distributed.get_world_size()
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor, sharing memory with it."""
        return local_tensor(tensor)

    def memory(self, tensor: Tensor) -> int:
        """How many bytes this rank holds for a tensor, or for what it is a view of."""
        return self.local(tensor).untyped_storage().nbytes()

    def held(self, tensor: Tensor) -> int:
        """How many elements of a tensor this rank holds, with what the library has added to make shards alike."""
        return self.local(tensor).numel()


_here = Here()


def here() -> Here:
    """The rank that calls."""
    return _here


def stand_on(ranks: Here) -> None:
    """Say what this process runs functions of the suite on: before the first of them, once.

    Args:
        ranks: Answers for all ranks of this process; where they are threads, for the one that asks.
    """
    global _here
    _here = ranks
