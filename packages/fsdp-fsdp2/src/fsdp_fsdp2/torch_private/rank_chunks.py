"""The chunks that ``fully_shard`` cuts a parameter into, made when they are used.

torch cuts each parameter, on each rank, into a view for every rank, and uses two of the views: with 1,024 ranks, that
is most of the time that sharding takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

__all__ = ["Chunks", "chunks_when_used"]


class Chunks:
    """What :func:`torch.chunk` returns, with empty chunks up to the number of ranks.

    Args:
        tensor: What is cut.
        count: The number of chunks.
        dim: The dimension that is cut.

    Example:
        >>> import torch
        >>> chunks = Chunks(torch.arange(5), 4, 0)
        >>> [chunks[index].tolist() for index in range(4)]
        [[0, 1], [2, 3], [4], []]
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._chunk_length = -(-tensor.size(dim) // count)  # rounded up

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._chunk_length
        length = min(self._chunk_length, self._tensor.size(self._dim) - start)
        is_past_end = length <= 0 < self._chunk_length  # of an empty tensor, torch makes each chunk a view
        return self._tensor.new_empty(0) if is_past_end else self._tensor.narrow(self._dim, start, length)


@contextmanager
def chunks_when_used() -> Iterator[None]:
    """A context in which ``fully_shard`` makes the chunks that it uses, and no others."""
    names = vars(_fsdp_param)
    original = names["_chunk_with_empty"]
    names["_chunk_with_empty"] = Chunks
    try:
        yield
    finally:
        names["_chunk_with_empty"] = original
