"""Tensors that are read when they are written on: what a checkpoint is made from without ever being in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fsdp_core.state.boxes import cut

__all__ = ["TensorSource", "blocks_of"]


@runtime_checkable
class TensorSource(Protocol):
    """A tensor that lies elsewhere, of which boxes can be read: :class:`~fsdp_core.checkpoint.SavedTensor` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box: a contiguous CPU tensor of shape ``lengths`` that begins at ``offsets``."""
        ...


def blocks_of(source: TensorSource, most_bytes: int) -> Iterator[Tensor]:
    """Read a source piece by piece.

    Args:
        source: Where to read.
        most_bytes: How large a piece may be, if it has more than one element.

    Yields:
        Contiguous CPU tensors that follow one another in the row-major order of ``source``.
    """
    for offsets, lengths in cut(source.shape, source.dtype.itemsize, most_bytes):
        yield source.read(offsets, lengths)
