"""Writes and reads safetensors files piece by piece, with at most one staging buffer in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from fsdp_core.checkpoint.format.safetensors_header import HEADER_KEY, FileTensor, build_header, parse_header
from fsdp_core.errors import CheckpointValueError
from fsdp_core.state.boxes import cut
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.dtypes import SAFETENSORS_NAMES, dtype_name
from fsdp_core.state.host_memory import memory_of

__all__ = ["HEADER_KEY", "STAGING_BYTES", "FileTensor", "parse_header", "read_box", "write_safetensors"]

STAGING_BYTES = 32 * 2**20
"""The maximum number of bytes that a write or a read copies at once."""

#: How much of a source is read at once. Reading less would need more requests to remote files; larger buffers would
#: stay with malloc after they are freed.
_SOURCE_BYTES = 16 * 2**20
#: How long a part of a row must be to be read by itself, which skips the rest of the row.
_DIRECT_RUN_BYTES = 256 * 2**10


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, Tensor | TensorSource]) -> tuple[int, str]:
    """Write ``tensors`` into ``stream`` as one safetensors file.

    Tensors may be on any device, have any strides and share memory; each is written separately. Tensors that are not
    contiguous CPU tensors are copied at most :data:`STAGING_BYTES` at a time.

    Args:
        stream: A binary stream opened for writing.
        tensors: The tensors by their name in the file. Sources are read 16 MiB at a time.

    Returns:
        The number of bytes written, and their checksum (xxh3, 64 bits, as 16 hexadecimal digits).

    Raises:
        CheckpointValueError: Safetensors does not support a dtype or a kind of tensor.
    """
    for name, tensor in tensors.items():
        if (reason := unsavable(tensor)) is not None:
            raise CheckpointValueError(f"can't save {name!r}: {reason}")
    shapes = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    header, names = build_header(shapes)
    digest = xxhash.xxh3_64()
    size = 0
    for piece in _file_blocks(header, [tensors[name] for name in names]):
        digest.update(piece)
        stream.write(piece)
        size += len(piece)
    return size, digest.hexdigest()


def unsavable(tensor: Tensor | TensorSource) -> str | None:
    """Return why ``tensor`` can't be written and what to do instead; ``None`` if it can be written.

    Example:
        >>> unsavable(torch.zeros(3)) is None
        True
        >>> unsavable(torch.zeros(3, dtype=torch.complex128))
        'safetensors has no dtype complex128; save torch.view_as_real(tensor) instead'
    """
    if not isinstance(tensor, Tensor):
        is_savable = tensor.dtype in SAFETENSORS_NAMES
        return None if is_savable else f"safetensors has no dtype {dtype_name(tensor.dtype)}; convert it"
    if tensor.is_meta:
        return "it is on the meta device and holds no data; materialise it first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor with layout {tensor.layout} is not dense; save tensor.to_dense() or its parts instead"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{type(tensor).__qualname__} is not a plain tensor; save the plain tensors that it consists of instead"
    if tensor.dtype not in SAFETENSORS_NAMES:
        remedy = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.view(torch.uint8)"
        return f"safetensors has no dtype {dtype_name(tensor.dtype)}; save {remedy} instead"
    return None


def _file_blocks(header: bytes, tensors: Sequence[Tensor | TensorSource]) -> Iterator[Any]:
    """Yield the bytes of a file, block by block."""
    yield header
    for tensor in tensors:
        blocks = _contiguous_blocks(tensor.detach()) if isinstance(tensor, Tensor) else _blocks_of_source(tensor)
        for block in blocks:
            yield memory_of(block)
            del block  # before the next one is allocated: one staging buffer at a time


def _contiguous_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield consecutive contiguous CPU tensors in the row-major order of ``tensor``."""
    if not tensor.numel():
        return
    if _is_contiguous_on_host(tensor):
        yield tensor
        return
    if tensor.ndim == 0 or tensor.nbytes <= STAGING_BYTES:
        yield tensor.resolve_conj().resolve_neg().cpu().contiguous()
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > STAGING_BYTES:
        for row in tensor:
            yield from _contiguous_blocks(row)
        return
    for rows in tensor.split(STAGING_BYTES // row_bytes):
        yield from _contiguous_blocks(rows)


def _blocks_of_source(source: TensorSource) -> Iterator[Tensor]:
    """Read consecutive contiguous CPU tensors in the row-major order of ``source``."""
    for offsets, lengths in cut(source.shape, source.dtype.itemsize, _SOURCE_BYTES):
        yield source.read(offsets, lengths)


def _is_contiguous_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def read_box(
    read_into: Callable[[memoryview, int], None],
    source: FileTensor,
    offsets: tuple[int, ...],
    out: Tensor,
    *,
    direct_run_bytes: int = _DIRECT_RUN_BYTES,
) -> None:
    """Read a box of a tensor in a file into ``out``, which may have another dtype, device or stride.

    Bytes that are contiguous on both sides are read directly into the memory of ``out``; others are copied through a
    staging buffer of at most :data:`STAGING_BYTES`.

    Args:
        read_into: Fills a buffer with the file's bytes from a position.
        source: The tensor in the file.
        offsets: Where the box begins in it.
        out: The target, at the shape of the box.
        direct_run_bytes: How long a run of bytes must be to be read by itself, without those between runs.
    """
    if out.ndim == 0:
        source = replace(source, shape=(1,))
        offsets = (0,)
        out = out.view(1)
    if out.numel():
        _read_part(read_into, source.dtype, source.shape, source.start, offsets, out, direct_run_bytes)


def _read_part(
    read_into: Callable[[memoryview, int], None],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
    offsets: tuple[int, ...],
    out: Tensor,
    direct_run_bytes: int,
) -> None:
    """Read a box of a part of the file, which begins at byte ``start`` and has ``shape``."""
    row_count = out.shape[0]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    needed_row_bytes = math.prod(out.shape[1:]) * dtype.itemsize
    position = start + offsets[0] * row_bytes
    are_rows_whole = tuple(out.shape[1:]) == shape[1:]
    if are_rows_whole and out.dtype == dtype and _is_contiguous_on_host(out):
        read_into(memory_of(out), position)
        return
    are_rows_read_in_part = not are_rows_whole and needed_row_bytes >= direct_run_bytes
    if row_bytes > STAGING_BYTES or are_rows_read_in_part:
        for row in range(row_count):
            row_position = position + row * row_bytes
            _read_part(read_into, dtype, shape[1:], row_position, offsets[1:], out[row], direct_run_bytes)
        return
    # Otherwise, whole rows are read into a staging buffer, and what is needed of them is copied.
    staged_row_count = max(1, min(row_count, STAGING_BYTES // row_bytes))
    staging = torch.empty((staged_row_count, *shape[1:]), dtype=dtype)
    needed_part = staging
    for dim in range(1, out.ndim):
        needed_part = needed_part.narrow(dim, offsets[dim], out.shape[dim])
    for row in range(0, row_count, staged_row_count):
        out_rows = out[row : row + staged_row_count]
        count = len(out_rows)
        read_into(memory_of(staging[:count]), position + row * row_bytes)
        out_rows.copy_(needed_part[:count])
