"""Tensors that a checkpoint leaves out, read from the base that the user names; imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_core.checkpoint.left_out.named_base import BoxesOfSource, find_all, refusal_without_base
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.tensor_bytes import BLOCK_BYTES, BytesSource
from fsdp_core.state.boxes import cut
from fsdp_core.state.dtype_names import ITEM_BYTES
from fsdp_core.state.dtypes import DTYPES
from fsdp_core.state.host_memory import memory_of

__all__ = ["bytes_in_base", "sources_in_base"]


def sources_in_base(
    files: StoredFiles, keys: Sequence[str], base: StrPath | None, *, instead: str
) -> dict[str, BoxesOfSource]:
    """Find left-out tensors of a checkpoint in its base.

    Args:
        files: The checkpoint.
        keys: The tensors that are needed.
        base: The base; ``None`` if the user has named none.
        instead: What to type where a base is needed, and none is named.

    Raises:
        CheckpointMismatchError: A base is needed, and none is named, or another one.
        CheckpointFormatError: The base can't be read.
    """
    if not keys:
        return {}
    if base is None:
        raise refusal_without_base(str(files.folder), files.manifest, keys, instead)
    return find_all(base, {key: files.manifest.left_out[key] for key in keys})


def bytes_in_base(boxes: BoxesOfSource, dtype_name: str) -> BytesSource:
    """Return a tensor of a base as a source for writing.

    Args:
        boxes: The tensor.
        dtype_name: The dtype to write it in.
    """
    shape = tuple(boxes.source.shape)
    item_bytes = max(ITEM_BYTES[dtype_name], boxes.source.dtype.itemsize)

    def blocks() -> Iterator[bytearray]:
        for offsets, lengths in cut(shape, item_bytes, BLOCK_BYTES):
            block = boxes.source.read(offsets, lengths).to(boxes.dtype).to(DTYPES[dtype_name]).contiguous()
            yield bytearray(memory_of(block))

    return BytesSource(shape=shape, dtype_name=dtype_name, blocks=blocks)
