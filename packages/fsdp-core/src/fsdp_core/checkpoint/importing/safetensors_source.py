"""Reads safetensors: one file, a Hugging Face folder with an index, or the pieces of HuggingFaceStorageWriter."""

from __future__ import annotations

import json
from typing import Any

from fsdp_core.checkpoint.format.safetensors_file import parse_header
from fsdp_core.checkpoint.format.safetensors_header import MAX_HEADER_BYTES
from fsdp_core.checkpoint.importing.files import SourceFile, open_file
from fsdp_core.checkpoint.importing.memory_budget import current_budget, memory_of_json
from fsdp_core.checkpoint.importing.tensors import Piece, StridedTensor, TensorInPieces
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.state.boxes import row_major_strides

__all__ = ["INDEX_SUFFIX", "SUFFIX", "read_safetensors_file", "read_safetensors_folder"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_MAX_INDEX_BYTES = 2**28
_SHARDING = "DCP_SHARDING_INFO"
_TENSOR_BYTES = 2500  # the memory that a tensor takes until it is saved, without its data and its name
_NAME_COPIES = 10  # how often the tensor's name is in memory until then


def read_safetensors_file(file: SourceFile) -> dict[str, StridedTensor]:
    """The tensors of one file, by name.

    Raises:
        CheckpointFormatError: It is not a safetensors file.
    """
    budget = current_budget()

    def read(start: int, end: int) -> bytes:
        data = file.read(start, end)
        if start:  # the header itself; the read from 0 is of its length
            budget.charge(memory_of_json(data))
        return data

    header = parse_header(read, file.size, str(file))
    budget.charge(sum(_TENSOR_BYTES + _NAME_COPIES * len(name) for name in header))
    return {
        name: StridedTensor(
            file=file,
            start=entry.start,
            shape=entry.shape,
            stride=row_major_strides(entry.shape),
            dtype=entry.dtype,
        )
        for name, entry in header.items()
    }


def read_safetensors_folder(folder: Folder) -> dict[str, StridedTensor | TensorInPieces]:
    """The tensors of all files of a folder, by name.

    Args:
        folder: A folder of safetensors files. With an index, only the tensors that it lists are read.

    Raises:
        CheckpointFormatError: A file or a tensor is missing, or a tensor is in two files.
    """
    listed_names = [name for name in folder.files() if "/" not in name]
    indexes = [name for name in listed_names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointFormatError(
            f"{folder} holds {len(indexes)} indexes: {', '.join(indexes)}.\n"
            "Import a folder with the files of one model."
        )
    file_of_tensor: dict[str, str] | None = None
    if indexes:
        file_of_tensor = _read_index(open_file(folder, indexes[0]))
        file_names = sorted(set(file_of_tensor.values()))
    else:
        file_names = [name for name in listed_names if name.endswith(SUFFIX)]
    files = [open_file(folder, name) for name in file_names]
    pieces: dict[str, list[Piece]] = {}
    tensors: dict[str, StridedTensor | TensorInPieces] = {}
    for file in files:
        offsets_of_pieces = _read_offsets(file)
        for name, tensor in read_safetensors_file(file).items():
            if file_of_tensor is not None and file_of_tensor.get(name) != file.name:
                continue
            if name in offsets_of_pieces:
                pieces.setdefault(name, []).append(
                    Piece(offsets=offsets_of_pieces[name], lengths=tensor.shape, source=tensor)
                )
            elif name in tensors:
                raise CheckpointFormatError(
                    f"{name!r} is in {file} and in another file of {folder}.\n"
                    "Import a folder with the files of one model."
                )
            tensors[name] = tensor  # in the place of a tensor in pieces, which is built below
    expected_names = () if file_of_tensor is None else tuple(file_of_tensor)
    missing_names = [name for name in expected_names if name not in tensors]
    if missing_names:
        raise CheckpointFormatError(
            f"{folder} is not complete: {indexes[0]} lists {missing_names[0]!r} and {len(missing_names) - 1} more "
            "tensors that its files don't hold. Restore the files."
        )
    for name, parts in pieces.items():
        # Several ranks may have written a piece that is replicated; one of each is taken.
        distinct_parts = {part.offsets: part for part in parts if 0 not in part.lengths}
        tensors[name] = TensorInPieces(
            name=name,
            shape=_full_shape(parts),
            dtype=parts[0].source.dtype,
            pieces=tuple(distinct_parts.values()),
        )
    return tensors


def _full_shape(parts: list[Piece]) -> tuple[int, ...]:
    """The smallest shape that holds all pieces."""
    ends = [[offset + length for offset, length in zip(part.offsets, part.lengths, strict=True)] for part in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _read_index(file: SourceFile) -> dict[str, str]:
    try:
        if file.size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {file.size} bytes")
        text = file.read(0, file.size)
        current_budget().charge(memory_of_json(text))
        file_of_tensor = json.loads(text)["weight_map"]
        if not isinstance(file_of_tensor, dict) or not all(isinstance(name, str) for name in file_of_tensor.values()):
            raise ValueError("its weight_map does not map names to files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointFormatError(f"{file} is not an index of safetensors files: {error}") from error
    return file_of_tensor


def _read_offsets(file: SourceFile) -> dict[str, tuple[int, ...]]:
    """Return the offsets of a file's tensors in the full tensors, if torch.distributed.checkpoint has written it."""
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else 0
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        return {}  # read_safetensors_file raises the error
    try:
        with current_budget().released_at_exit():
            text = file.read(8, 8 + length)
            current_budget().charge(memory_of_json(text))
            metadata = json.loads(text).get("__metadata__") or {}
            sharding = metadata.get(_SHARDING, "{}")
        current_budget().charge(memory_of_json(sharding.encode()))
        entries: dict[str, Any] = json.loads(sharding)
        return {name: tuple(int(n) for n in entry["saved_offsets"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointFormatError(f"{file} has invalid metadata: {error}") from error
