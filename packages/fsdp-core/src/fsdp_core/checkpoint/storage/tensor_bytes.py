"""Copies the bytes of stored tensors a few MiB at a time, without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import xxhash

from fsdp_core.checkpoint.format.chunks import StoredChunk
from fsdp_core.checkpoint.format.safetensors_header import build_header
from fsdp_core.checkpoint.storage.joined_folder import Paths, open_places
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.state.boxes import copy_into, cut, overlap
from fsdp_core.state.coverage import Box
from fsdp_core.state.dtype_names import ITEM_BYTES

__all__ = ["BLOCK_BYTES", "BytesSource", "TensorBytes", "open_files", "write_sources"]

BLOCK_BYTES = 4 * 2**20
"""The maximum number of bytes of a tensor that are read at once from a local disk."""

_REMOTE_BLOCK_BYTES = 16 * 2**20  # each read is a request


@dataclass(frozen=True, kw_only=True)
class BytesSource:
    """A tensor whose bytes are read only when they are written.

    Attributes:
        shape: Its shape.
        dtype_name: The name of its dtype.
        blocks: Starts reading it, and returns consecutive blocks of bytes in row-major order.
    """

    shape: tuple[int, ...]
    dtype_name: str
    blocks: Callable[[], Iterator[bytearray]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]


def open_files(path: Paths) -> StoredFiles:
    """Return the files of a checkpoint; only the manifest is read.

    Raises:
        CheckpointFormatError: There is no checkpoint that this version can read.
    """
    folder = open_places(path)
    return StoredFiles(folder, read_manifest(folder))


class TensorBytes:
    """Reads boxes of the tensors of a checkpoint.

    Args:
        files: Its files.
    """

    def __init__(self, files: StoredFiles) -> None:
        self.files = files
        self.manifest = files.manifest
        self.block_bytes = BLOCK_BYTES if files.folder.local else _REMOTE_BLOCK_BYTES

    def read(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> bytearray:
        """Return the bytes of a box of a tensor, in row-major order.

        Raises:
            CheckpointFormatError: A file does not match the manifest.
        """
        stored = self.manifest.tensors[key]
        item_bytes = ITEM_BYTES[stored.dtype_name]
        requested: Box = tuple(offsets), tuple(lengths)
        out = bytearray(math.prod(lengths) * item_bytes)
        for chunk in stored.overlapping(requested):
            common = overlap((chunk.offsets, chunk.lengths), requested)
            assert common is not None
            for span in _contiguous(chunk, common):
                offsets_in_box = tuple(begin - offset for begin, offset in zip(span[0], offsets, strict=True))
                self._read_span(chunk, span, item_bytes, memoryview(out), tuple(lengths), offsets_in_box)
        return out

    def _read_span(
        self,
        chunk: StoredChunk,
        span: Box,
        item_bytes: int,
        out: memoryview,
        shape: tuple[int, ...],
        offsets_in_box: tuple[int, ...],
    ) -> None:
        first = 0  # the index of the span's first element in the chunk, in row-major order
        for offset, begin, length in zip(span[0], chunk.offsets, chunk.lengths, strict=True):
            first = first * length + offset - begin
        start = self.files.locate(chunk.file, chunk.key).start + first * item_bytes
        if span[1] == shape:
            self.files.fill(chunk.file, chunk.key, out, start)
            return
        span_bytes = memoryview(bytearray(math.prod(span[1]) * item_bytes))
        self.files.fill(chunk.file, chunk.key, span_bytes, start)
        copy_into(out, shape, offsets_in_box, span_bytes, item_bytes, span[1])

    def source(self, key: str, rows: tuple[int, int] | None = None, *, dtype_name: str | None = None) -> BytesSource:
        """Return a tensor as a source for writing.

        Args:
            key: Its key in the manifest.
            rows: The first row and the one after the last; all rows if ``None``.
            dtype_name: The dtype to convert it to, which imports torch; its own if ``None``.
        """
        stored = self.manifest.tensors[key]
        shape = stored.shape if rows is None else (rows[1] - rows[0], *stored.shape[1:])
        stored_dtype_name = dtype_name or stored.dtype_name

        def blocks() -> Iterator[bytearray]:
            first = 0 if rows is None else rows[0]
            for offsets, lengths in cut(shape, ITEM_BYTES[stored.dtype_name], self.block_bytes):
                begin = (first + offsets[0], *offsets[1:]) if offsets else ()
                block = self.read(key, begin, lengths)
                if stored_dtype_name != stored.dtype_name:
                    block = _convert_block(block, stored.dtype_name, stored_dtype_name)
                yield block

        return BytesSource(shape=shape, dtype_name=stored_dtype_name, blocks=blocks)

    def small_source(self, name: str) -> BytesSource:
        """Return a tensor of the plain data as a source for writing, by its name in the plain data."""
        state_tensors = self.manifest.state_tensors
        assert state_tensors is not None
        header_entry = self.files.locate(state_tensors, name)

        def blocks() -> Iterator[bytearray]:
            for begin in range(0, header_entry.nbytes, self.block_bytes):
                block = bytearray(min(self.block_bytes, header_entry.nbytes - begin))
                self.files.fill(state_tensors, name, memoryview(block), header_entry.start + begin)
                yield block

        return BytesSource(shape=header_entry.shape, dtype_name=header_entry.dtype_name, blocks=blocks)

    def blocks_of_file(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a whole file."""
        size = self.manifest.files[name].size
        for start in range(0, size, self.block_bytes):
            yield self.files.read_bytes(name, start, min(start + self.block_bytes, size))


def _contiguous(chunk: StoredChunk, box: Box) -> Iterator[Box]:
    """Split a box into parts that are each one run of bytes in a chunk."""
    offsets, lengths = box
    axis = len(lengths)
    while axis > 0 and lengths[axis - 1] == chunk.lengths[axis - 1]:
        axis -= 1
    # The axes after the last one that is cut are full, so a part may extend along that one: axes before it are looped
    # over.
    loop_axes = max(axis - 1, 0)
    outer_ranges = [range(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)][:loop_axes]
    for outer_indices in itertools.product(*outer_ranges):
        yield (*outer_indices, *offsets[loop_axes:]), (*(1,) * loop_axes, *lengths[loop_axes:])


def _convert_block(block: bytearray, dtype_name: str, target_dtype: str) -> bytearray:
    import torch

    from fsdp_core.state.dtypes import DTYPES

    source = torch.frombuffer(block, dtype=DTYPES[dtype_name])
    out = bytearray(source.numel() * ITEM_BYTES[target_dtype])
    torch.frombuffer(out, dtype=DTYPES[target_dtype]).copy_(source)
    return out


def write_sources(
    stream: BinaryIO,
    sources: Mapping[str, BytesSource],
    *,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[int, str]:
    """Write tensors into ``stream`` as one safetensors file, a block at a time.

    Args:
        stream: A binary stream opened for writing.
        sources: The tensors by their name in the file.
        metadata: Strings to store in the file's metadata.
        on_bytes: Called with the number of bytes that have just been written.

    Returns:
        The number of bytes written, and their checksum (xxh3, 64 bits, as 16 hexadecimal digits).

    Raises:
        CheckpointValueError: There are more tensors than a safetensors header can hold.
    """
    shapes = {name: (source.shape, source.dtype_name) for name, source in sources.items()}
    header, names = build_header(shapes, metadata)
    stream.write(header)
    digest = xxhash.xxh3_64(header)
    size = len(header)
    for name in names:
        for block in sources[name].blocks():
            digest.update(block)
            stream.write(block)
            size += len(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return size, digest.hexdigest()
