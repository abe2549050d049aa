"""What a rank holds of a tensor: boxes of it, at their offsets. The only form in which state crosses a boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_core.checkpoint.sources import TensorSource

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["Chunk", "ChunkedTensor", "chunked"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a larger tensor.

    Attributes:
        offsets: Where the box begins in the larger tensor, one number per dimension; ``()`` for a 0-dim tensor.
        data: The box itself, at its own shape; for saving it may be a source, which is read when it is written. On
            loading, it is a tensor that is written in place.
    """

    offsets: tuple[int, ...]
    data: Tensor | TensorSource


class ChunkedTensor:
    """This rank's part of a tensor: zero or more boxes that don't overlap.

    The boxes of all ranks with ``replica == 0`` cover the tensor exactly. A rank that holds nothing of the tensor (more
    ranks than rows) has no chunks.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        chunks: The boxes that this rank holds.
        replica: Which copy of the tensor these boxes belong to. Only copy 0 is written; every copy is read into.

    Raises:
        ValueError: A chunk does not lie inside the tensor.
    """

    # Not a dataclass, for Lightning looks into those for tensors to replace.
    __slots__ = ("chunks", "dtype", "replica", "shape")

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    replica: int

    def __init__(
        self, *, shape: tuple[int, ...], dtype: torch.dtype, chunks: tuple[Chunk, ...], replica: int = 0
    ) -> None:
        self.shape, self.dtype, self.chunks, self.replica = shape, dtype, chunks, replica
        for chunk in chunks:
            if not _lies_inside(chunk, shape):
                raise ValueError(
                    f"a chunk of shape {tuple(chunk.data.shape)} at {chunk.offsets} does not lie inside a tensor of "
                    f"shape {shape}"
                )

    def copied(self, copies: Mapping[int, Tensor]) -> ChunkedTensor:
        """The same boxes over copies of what they hold, with none of them if this is not copy 0.

        Args:
            copies: By the id of the tensor, each of the same shape. What it doesn't name stays as it is.
        """
        made = object.__new__(ChunkedTensor)  # the boxes have been checked
        made.shape, made.dtype, made.replica = self.shape, self.dtype, self.replica
        made.chunks = (
            tuple([Chunk(offsets=one.offsets, data=copies.get(id(one.data), one.data)) for one in self.chunks])
            if self.replica == 0
            else ()
        )
        return made

    def __repr__(self) -> str:
        return f"ChunkedTensor(shape={self.shape}, dtype={self.dtype}, chunks={self.chunks}, replica={self.replica})"


def _lies_inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    box = chunk.data.shape
    if not len(box) == len(chunk.offsets) == len(shape):
        return False
    for offset, length, size in zip(chunk.offsets, box, shape, strict=True):  # a save does this for every tensor
        if offset < 0 or offset + length > size:
            return False
    return True


def chunked(tensor: Tensor | ChunkedTensor | TensorSource, *, rank: int = 0) -> ChunkedTensor:
    """Describe what this rank holds of ``tensor``.

    Args:
        tensor: A :class:`~torch.distributed.tensor.DTensor` (its own mesh and placements say which box is here; its
            local tensor may live on another device than the mesh, as under CPU offload), a plain tensor or a source
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
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, ChunkedTensor):
        return tensor
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor)
    shape = tuple(tensor.shape)
    chunk = Chunk(offsets=(0,) * len(shape), data=tensor.detach() if isinstance(tensor, Tensor) else tensor)
    return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=() if 0 in shape else (chunk,), replica=rank)


def _of_dtensor(tensor: DTensor) -> ChunkedTensor:
    if torch.is_grad_enabled():  # then the local tensor would be made anew, with a way back for gradients
        with torch.no_grad():
            return _of_dtensor(tensor)
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the tensor's mesh
        return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=())
    offsets, lengths, replica = _box(shape, tensor.placements, tuple(mesh.shape), tuple(coordinate))
    local = tensor.to_local().detach()
    if not all(lengths):
        return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=(), replica=replica)
    if tuple(local.shape) != lengths:
        raise ValueError(
            f"this rank's part of a DTensor of shape {shape} placed as {tensor.placements} should have shape "
            f"{lengths}, but it has {tuple(local.shape)}: build the DTensor with its true shape and stride"
        )
    chunk = Chunk(offsets=offsets, data=local)
    return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=(chunk,), replica=replica)


@lru_cache(maxsize=1024)  # a model repeats its shapes, and a save asks for each of them three times
def _box(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The box at a coordinate of a mesh: its offsets, its lengths, and which copy of the tensor it belongs to."""
    from torch.distributed.tensor import Replicate, Shard

    offsets, lengths, replica = [0] * len(shape), list(shape), 0
    for placement, index, ranks in zip(placements, coordinate, mesh, strict=True):
        # By exact type: torch's strided shard has been a subclass of Shard, and holds rows that are no box.
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            # As torch.chunk cuts: equal pieces, then a smaller one, then empty ones.
            piece = -(-lengths[dim] // ranks)
            start = min(index * piece, lengths[dim])
            offsets[dim], lengths[dim] = offsets[dim] + start, min(piece, lengths[dim] - start)
        elif type(placement) is Replicate:
            replica = replica * ranks + index
        else:
            raise ValueError(
                f"a DTensor placed as {placements} is not made of boxes, so it can't be saved or loaded as it "
                "is: redistribute it to Shard(dim) and Replicate() first"
            )
    return tuple(offsets), tuple(lengths), replica
