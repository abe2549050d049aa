"""What a rank holds of a tensor: boxes of it, at their offsets. The only form in which state crosses a boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Chunk", "ChunkedTensor", "chunked"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a larger tensor.

    Attributes:
        offsets: Where the box begins in the larger tensor, one number per dimension; ``()`` for a 0-dim tensor.
        data: The box itself, at its own shape. On loading, it is written in place.
    """

    offsets: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkedTensor:
    """This rank's part of a tensor: zero or more boxes that don't overlap.

    The boxes of all ranks with ``replica == 0`` cover the tensor exactly. A rank that holds nothing of the tensor (more
    ranks than rows) has no chunks.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        chunks: The boxes that this rank holds.
        replica: Which copy of the tensor these boxes belong to. Only copy 0 is written; every copy is read into.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    replica: int = 0


def chunked(tensor: Tensor | ChunkedTensor, *, rank: int = 0) -> ChunkedTensor:
    """Describe what this rank holds of ``tensor``.

    Args:
        tensor: A :class:`~torch.distributed.tensor.DTensor` (its own spec says which box is here), a plain tensor
            (taken to be the same on every rank), or what is chunked already.
        rank: This rank. A plain tensor on rank *n* is its *n*-th copy.

    Returns:
        The boxes, sharing memory with ``tensor``.

    Raises:
        ValueError: ``tensor`` is a DTensor with a pending (partial) reduction or with a strided placement, which has
            no box form.

    Example:
        >>> whole = chunked(torch.zeros(4, 2), rank=1)
        >>> whole.shape, whole.replica, whole.chunks[0].offsets
        ((4, 2), 1, (0, 0))
    """
    raise NotImplementedError
