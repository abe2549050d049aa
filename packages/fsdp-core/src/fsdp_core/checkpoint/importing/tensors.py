"""Sources for tensors in another library's files: strided, in pieces, as ranges of a flat tensor, cast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.safetensors_file import FileTensor, read_box
from fsdp_core.checkpoint.importing.files import SourceFile
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.state.boxes import overlap
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.coverage import find_fault
from fsdp_core.state.dtypes import dtype_name

__all__ = ["CastTensor", "CountedTensor", "FlatRange", "Piece", "StridedTensor", "TensorInPieces", "read_full"]


@dataclass(frozen=True, kw_only=True)
class StridedTensor:
    """A tensor in a file, its elements at any strides. Two that are equal are one tensor under two names.

    Attributes:
        file: The file.
        start: Its first element's first byte.
        shape: Its shape.
        stride: How many elements lie between neighbours along each dimension.
        dtype: Its dtype.
    """

    file: SourceFile
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box."""
        out = torch.empty(tuple(lengths), dtype=self.dtype)
        if not out.numel():
            return out
        # the dimensions as they are nested in memory, from the outermost
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], self.shape[dim] == 1))
        if self._is_dense(order):
            entry = FileTensor(
                shape=tuple(self.shape[dim] for dim in order), dtype_name=dtype_name(self.dtype), start=self.start
            )
            read_box(self.file.fill, entry, tuple(offsets[dim] for dim in order), out.permute(order))
            return out
        # Read everything from the first element of the box to the last, and pick the box from it.
        first = sum(offset * step for offset, step in zip(offsets, self.stride, strict=True))
        span = 1 + sum((length - 1) * step for length, step in zip(lengths, self.stride, strict=True))
        flat = torch.empty(span, dtype=self.dtype)
        entry = FileTensor(
            shape=(span,), dtype_name=dtype_name(self.dtype), start=self.start + first * self.dtype.itemsize
        )
        read_box(self.file.fill, entry, (0,), flat)
        return out.copy_(flat.as_strided(tuple(lengths), self.stride))

    def _is_dense(self, order: Sequence[int]) -> bool:
        """Whether its dimensions in this order are those of a contiguous tensor."""
        step = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.stride[dim] != step:
                return False
            step *= self.shape[dim]
        return True


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a larger tensor.

    Attributes:
        offsets: Where it begins in the larger tensor.
        lengths: Its shape.
        source: The source of its elements. If the source is larger than the box, the box is its beginning.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    source: TensorSource


@dataclass(frozen=True, kw_only=True)
class TensorInPieces:
    """A tensor whose boxes are held by several sources.

    Attributes:
        name: What to call it in an error.
        shape: Its shape.
        dtype: Its dtype.
        pieces: The boxes, which cover it exactly.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = field(repr=False)

    def __post_init__(self) -> None:
        fault = find_fault(self.shape, [(piece.offsets, piece.lengths) for piece in self.pieces])
        if fault is not None:
            raise CheckpointFormatError(
                f"{self.name!r} of shape {self.shape} is not complete in the source: {fault}. "
                "Restore the missing files."
            )

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box."""
        out = torch.empty(tuple(lengths), dtype=self.dtype)
        for piece in self.pieces:
            common = overlap((piece.offsets, piece.lengths), (tuple(offsets), tuple(lengths)))
            if common is None:
                continue
            begins, sizes = common
            starts_in_out = [begin - offset for begin, offset in zip(begins, offsets, strict=True)]
            starts_in_piece = tuple(begin - offset for begin, offset in zip(begins, piece.offsets, strict=True))
            inside = tuple(slice(start, start + size) for start, size in zip(starts_in_out, sizes, strict=True))
            out[inside] = piece.source.read(starts_in_piece, sizes)
        return out


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """A tensor that is a range of a flat tensor, which is stored in consecutive pieces of equal length.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        start: The index of its first element in the flat tensor.
        pieces: The pieces of the flat tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    pieces: tuple[TensorSource, ...] = field(repr=False)

    def __post_init__(self) -> None:
        available = sum(piece.shape[0] for piece in self.pieces)
        if not 0 <= self.start <= self.start + math.prod(self.shape) <= available:
            raise CheckpointFormatError(
                f"a tensor of shape {self.shape} should begin at element {self.start} of a flat one that has "
                f"{available}: the metadata and the shards are not of one checkpoint"
            )

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box, run by run of elements that follow one another."""
        out = torch.empty(tuple(lengths), dtype=self.dtype)
        self._read_box(out, self.start, self.shape, tuple(offsets))
        return out

    def _read_box(self, out: Tensor, start: int, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        row_length = math.prod(shape[1:])
        if tuple(out.shape[1:]) == shape[1:]:
            self._read_run(out.view(-1), start + (offsets[0] * row_length if shape else 0))
            return
        for index in range(out.shape[0]):
            self._read_box(out[index], start + (offsets[0] + index) * row_length, shape[1:], offsets[1:])

    def _read_run(self, out: Tensor, start: int) -> None:
        length = self.pieces[0].shape[0]
        position = 0
        while position < out.numel():
            index, inside = divmod(start + position, length)
            count = min(out.numel() - position, length - inside)
            out[position : position + count] = self.pieces[index].read((inside,), (count,))
            position += count


@dataclass(frozen=True, kw_only=True)
class CastTensor:
    """A source, converted to another dtype while it is read."""

    source: TensorSource
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.source.shape)

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box."""
        return self.source.read(offsets, lengths).to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class CountedTensor:
    """A source that reports the number of bytes read, to show progress."""

    source: TensorSource
    on_bytes: Callable[[int], None] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.source.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box."""
        box = self.source.read(offsets, lengths)
        self.on_bytes(box.nbytes)
        return box


def read_full(source: TensorSource) -> Tensor:
    """Read all of a source."""
    return source.read((0,) * len(source.shape), tuple(source.shape))
