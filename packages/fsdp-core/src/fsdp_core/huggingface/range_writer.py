"""Writes safetensors files from what ranks hold: each rank writes the byte ranges of its boxes, and rank 0 the rest."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import add, sub

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.safetensors_header import build_header, parse_header
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.errors import CheckpointError, CheckpointMismatchError
from fsdp_core.huggingface.views import View
from fsdp_core.state.boxes import cut
from fsdp_core.state.chunks import Chunk, ChunkedTensor
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.state.dtypes import DTYPES, dtype_name
from fsdp_core.state.host_memory import memory_of

__all__ = ["FilePlan", "PlannedTensor", "allocate", "check_covered", "write_ranges"]

_BLOCK_BYTES = 16 * 2**20  # of a tensor that is copied to the host, and converted, at a time


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor to write.

    Attributes:
        view: The part of the module's tensor that it is.
        dtype_name: The dtype that it is stored in.
    """

    view: View
    dtype_name: str

    @property
    def nbytes(self) -> int:
        """Its size in the file in bytes."""
        return math.prod(self.view.shape) * DTYPES[self.dtype_name].itemsize


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """The tensors of one file.

    Attributes:
        name: The name of the file in the folder.
        tensors: Its tensors, by their names in it.
        header: Its first bytes.
        starts: Where each tensor begins in the file.
        size: Its size in bytes.
    """

    name: str
    tensors: Mapping[str, PlannedTensor] = field(repr=False)
    header: bytes = field(repr=False)
    starts: Mapping[str, int] = field(repr=False)
    size: int

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, PlannedTensor]) -> FilePlan:
        """Lay out a file."""
        shapes = {key: (tensor.view.shape, tensor.dtype_name) for key, tensor in sorted(tensors.items())}
        header, _ = build_header(shapes)
        size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        header_entries = parse_header(lambda start, end: header[start:end], size, name)
        starts = {key: entry.start for key, entry in header_entries.items()}
        return cls(name=name, tensors=dict(tensors), header=header, starts=starts, size=size)


def allocate(folder: Folder, plans: list[FilePlan]) -> None:
    """Create the files at their full size, with their headers. One rank calls this, before others write."""
    for plan in plans:
        with folder.writing(plan.name) as stream:
            stream.write(plan.header)
            stream.truncate(plan.size)


def check_covered(
    boxes_by_rank: list[Mapping[str, list[Box]]], plans: list[FilePlan], shapes: Mapping[str, list[int]]
) -> None:
    """Refuse to write tensors that the ranks' boxes don't cover: the file would hold zeros in the holes.

    Args:
        boxes_by_rank: What each rank writes: boxes by the names of the module's tensors.
        plans: The files.
        shapes: The shapes of the module's tensors.

    Raises:
        CheckpointMismatchError: Boxes leave a hole or overlap.
    """
    needed_tensors = {tensor.view.source for plan in plans for tensor in plan.tensors.values()}
    for name in sorted(needed_tensors):
        fault = find_fault(
            shapes[name], [box for boxes_of_rank in boxes_by_rank for box in boxes_of_rank.get(name, ())]
        )
        if fault is not None:
            raise CheckpointMismatchError(
                f"the ranks' chunks of {name!r} don't form the whole tensor of shape {list(shapes[name])}: {fault}. "
                "Nothing was saved.\nThe boxes of copy 0 that a backend returns must cover each tensor exactly once: "
                "report this to the authors of the strategy's package."
            )


def write_ranges(folder: Folder, plans: list[FilePlan], state: Mapping[str, ChunkedTensor]) -> int:
    """Write what this rank holds into files that are there already.

    Args:
        folder: A local folder.
        plans: The files.
        state: This rank's boxes of the module's tensors.

    Returns:
        The number of bytes written.
    """
    bytes_written = 0
    for plan in plans:
        with ExitStack() as open_files:
            descriptor: int | None = None
            for name, tensor in plan.tensors.items():
                source = state[tensor.view.source]
                own_chunks = source.chunks if source.replica == 0 else ()
                for chunk in own_chunks:
                    for box, block in _blocks(chunk, tensor):
                        if descriptor is None:
                            descriptor = _open_to_write(folder.path(plan.name))
                            open_files.callback(os.close, descriptor)
                        bytes_written += _write_box(descriptor, plan.starts[name], tensor.view.shape, box, block)
            if descriptor is not None:
                os.fsync(descriptor)
    return bytes_written


def _open_to_write(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no file at {path}, which rank 0 has created: save to a file system that all ranks share"
        ) from error


def _blocks(chunk: Chunk, tensor: PlannedTensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield a rank's parts of a tensor of a file: boxes of that tensor, each with a contiguous CPU tensor."""
    view = tensor.view
    dtype = DTYPES[tensor.dtype_name]
    common = view.overlap((chunk.offsets, tuple(chunk.data.shape)))
    if common is None:
        return
    (offsets, lengths), _ = common
    start_in_chunk = tuple(map(sub, offsets, chunk.offsets))
    for begin, size in cut(lengths, chunk.data.dtype.itemsize, _BLOCK_BYTES):
        offsets_in_chunk = tuple(map(add, start_in_chunk, begin))
        if isinstance(chunk.data, Tensor):
            block = chunk.data.detach()[tuple(map(slice, offsets_in_chunk, map(add, offsets_in_chunk, size)))]
        else:
            block = chunk.data.read(offsets_in_chunk, size)
        box_in_file = view.overlap((tuple(map(add, offsets, begin)), size))
        assert box_in_file is not None  # it lies inside the view
        with torch.no_grad():
            yield box_in_file[1], view.as_stored(block).to(device="cpu", dtype=dtype).resolve_conj().contiguous()


def _write_box(descriptor: int, start: int, shape: tuple[int, ...], box: Box, block: Tensor) -> int:
    """Write a box of a tensor, run by run of bytes that follow one another in the file."""
    offsets, lengths = box
    item_bytes = block.dtype.itemsize
    axis = len(shape)  # the dimensions from here on are complete
    while axis > 0 and lengths[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # a run extends along this dimension and those after it
    strides = [math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]
    run_bytes = math.prod(lengths[axis:]) * item_bytes
    data = memory_of(block)
    first_position = start + sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for run_number, indices in enumerate(itertools.product(*(range(length) for length in lengths[:axis]))):
        file_offset = first_position + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        _write_all(descriptor, data[run_number * run_bytes : (run_number + 1) * run_bytes], file_offset)
    return block.nbytes


def _write_all(descriptor: int, data: memoryview, file_offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, file_offset)
        data = data[count:]
        file_offset = file_offset + count


def plan_tensor(view: View, dtype: torch.dtype) -> PlannedTensor:
    """Return a tensor to write in a dtype."""
    return PlannedTensor(view=view, dtype_name=dtype_name(dtype))
