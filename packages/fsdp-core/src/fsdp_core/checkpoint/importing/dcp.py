"""A folder of torch.distributed.checkpoint: ``.metadata`` and the ``.distcp`` files that it names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.checkpoint.importing.files import SourceFile, open_file
from fsdp_core.checkpoint.importing.memory_budget import current_budget
from fsdp_core.checkpoint.importing.plain import Make, PlainReader
from fsdp_core.checkpoint.importing.tensors import Piece, StridedTensor, TensorInPieces
from fsdp_core.checkpoint.importing.torch_file import TorchFile
from fsdp_core.checkpoint.importing.unpickling import MAX_PICKLE_BYTES, unpickle
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.boxes import is_shape
from fsdp_core.state.dtypes import SAFETENSORS_NAMES, dtype_name

__all__ = ["METADATA", "read_dcp"]

METADATA = ".metadata"


def read_dcp(
    folder: Folder, prefix: str = "", *, drop: Iterable[str] = (), tensors_only: bool = False
) -> dict[str, Any]:
    """Read the nest in a folder of torch.distributed.checkpoint.

    Args:
        folder: The folder.
        prefix: The subfolder that holds the checkpoint, with a trailing slash.
        drop: Paths to omit.
        tensors_only: Whether to omit values that are neither tensors nor a module's extra state.

    Returns:
        The saved nest, with a source for each tensor. Keys that were not strings are strings, as torch writes them.

    Raises:
        CheckpointFormatError: It is damaged, or names files outside of itself.
        CheckpointValueError: It holds values that are neither plain data nor tensors.
    """
    file = open_file(folder, prefix + METADATA)
    if file.size > MAX_PICKLE_BYTES:
        raise CheckpointFormatError(f"{file} has {file.size} bytes, and this reads at most {MAX_PICKLE_BYTES}")
    reader = PlainReader(_RECORDS)
    metadata = reader.read(unpickle(file.read(0, file.size), str(file)))
    reader.raise_if_refused(file)
    if not isinstance(metadata, _Metadata):
        raise CheckpointFormatError(f"{file} is not metadata of torch.distributed.checkpoint: {type(metadata)}")
    leaves = _Leaves(folder, prefix, metadata, PlainReader(drop=drop))
    leaf_of_path: dict[tuple[Any, ...], Any] = {}
    for name, entry in metadata.entries.items():
        path = metadata.path_of(name)
        if leaves.matches_drop(path) or (tensors_only and entry.dtype is None and not name.endswith("_extra_state")):
            continue
        leaf_of_path[path] = leaves.read(name, entry, path)
    leaves.raise_if_refused()
    return _nest(leaf_of_path)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tensor: its shape, dtype, and its boxes' offsets and lengths; all empty for values that are no tensors."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _FileRange:
    """A range of a file."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class _Metadata:
    """The content of ``.metadata``.

    Attributes:
        entries: The values by their flattened names, such as ``optimizer.state.weight.exp_avg``.
        paths: By flattened name, the keys that lead to a value in the nest.
        ranges: Where values are, by flattened name and by the offsets of a tensor's box, or ``None``.
    """

    entries: Mapping[str, _Entry]
    paths: Mapping[str, tuple[Any, ...]]
    ranges: Mapping[tuple[str, tuple[int, ...] | None], _FileRange]

    def path_of(self, name: str) -> tuple[Any, ...]:
        """Return the path of a flattened name in the nest."""
        path = self.paths.get(name, (name,))
        return path if isinstance(path, tuple) and path and all(type(k) in (int, str) for k in path) else (name,)


@dataclass
class _Leaves:
    """Reads the values that the metadata lists, or makes sources for them.

    Attributes:
        folder: The folder.
        prefix: The subfolder of the checkpoint, with a trailing slash.
        metadata: The metadata.
        reader: Converts values to plain data.
        files: The files opened so far, by their path in the checkpoint.
        bytes_used: How many bytes of each of these files values take. More than it has shows that it is damaged.
    """

    folder: Folder
    prefix: str
    metadata: _Metadata
    reader: PlainReader
    files: dict[str, SourceFile] = field(default_factory=dict)
    bytes_used: Counter[str] = field(default_factory=Counter)

    def matches_drop(self, path: tuple[Any, ...]) -> bool:
        """Return whether a leaf, or a container of it, is dropped."""
        keys = tuple(map(str, path))
        return any(self.reader.matches_drop(keys[:length]) for length in range(1, len(keys) + 1))

    def read(self, name: str, entry: _Entry, path: tuple[Any, ...]) -> Any:
        """Return a source for a tensor, or the plain data."""
        keys = tuple(map(str, path))
        if entry.dtype is None:
            file, start, end = self.find_range(name, None)
            archive = TorchFile(file, start, end)
            reader_of_archive = archive.reader()
            value = reader_of_archive.read(archive.content, keys)
            self.reader.add_refusals_of(reader_of_archive)
            return value
        if entry.dtype not in SAFETENSORS_NAMES:
            self.reader.refuse(keys, f"a tensor of {dtype_name(entry.dtype)}, a dtype that safetensors lacks")
            return None
        pieces = tuple(
            Piece(
                offsets=offsets,
                lengths=lengths,
                source=_SavedPiece(lengths, entry.dtype, *self.find_range(name, offsets)),
            )
            for offsets, lengths in entry.boxes
            if 0 not in lengths
        )
        return TensorInPieces(name=name, shape=entry.shape, dtype=entry.dtype, pieces=pieces)

    def find_range(self, name: str, offsets: tuple[int, ...] | None) -> tuple[SourceFile, int, int]:
        """Return the file of a value, its first byte there and the byte after its last one."""
        ranges = self.metadata.ranges
        file_range = ranges.get((name, offsets))
        if file_range is None and not any(offsets or ()):  # a tensor in one piece may be listed without offsets
            file_range = ranges.get((name, None))
        if file_range is None:
            raise CheckpointFormatError(f"{self.folder} does not name the file of {name!r} at {offsets}")
        if file_range.path not in self.files:
            self.files[file_range.path] = open_file(self.folder, self.prefix + file_range.path)
        file = self.files[file_range.path]
        if not 0 <= file_range.start <= file_range.start + file_range.length <= file.size:
            raise CheckpointFormatError(
                f"{file} has {file.size} bytes, but {name!r} should lie at {file_range.start} to "
                f"{file_range.start + file_range.length}: it is truncated. Restore it from a backup."
            )
        self.bytes_used[file_range.path] += file_range.length
        if self.bytes_used[file_range.path] > file.size:
            raise CheckpointFormatError(
                f"{file} has {file.size} bytes, and the metadata lists more than these, so some for several names: it "
                "is damaged. Restore it from a backup."
            )
        return file, file_range.start, file_range.start + file_range.length

    def raise_if_refused(self) -> None:
        """Raise an error if a value was refused, or if a path to drop was not found."""
        self.reader.raise_if_refused(self.folder)
        names = {join_path(*map(str, self.metadata.path_of(name)[:2])) for name in self.metadata.entries}
        self.reader.refuse_unfound_drops(self.folder, sorted(names)[:40])


class _SavedPiece:
    """A box in a range of a file, written by torch.save; the range is parsed on the first read."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, file: SourceFile, start: int, end: int) -> None:
        if math.prod(shape) * dtype.itemsize > end - start:
            raise CheckpointFormatError(
                f"{file} should hold a tensor of shape {shape} and {dtype_name(dtype)} in the {end - start} bytes from "
                f"{start} on, which is too few: it is damaged. Restore it from a backup."
            )
        self.shape, self.dtype = shape, dtype
        self._file = file
        self._start = start
        self._end = end

    @cached_property
    def _tensor(self) -> StridedTensor:
        with current_budget().released_at_exit():
            archive = TorchFile(self._file, self._start, self._end)
            reader = archive.reader()
            tensor = reader.read(archive.content)
            reader.raise_if_refused(self._file)
        if not isinstance(tensor, StridedTensor) or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise CheckpointFormatError(
                f"{self._file} does not hold the tensor of shape {self.shape} and {dtype_name(self.dtype)} at byte "
                f"{self._start} that its metadata lists: it is damaged. Restore it from a backup."
            )
        return tensor

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box."""
        return self._tensor.read(offsets, lengths)


def _nest(leaves: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the nest whose values are given by the keys that lead to them."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise CheckpointFormatError(f"its metadata puts {path!r} into something that is not a container")
        node[path[-1]] = leaf
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Convert dicts whose keys are all integers back to lists."""
    if type(value) is not dict:
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    return [inner[key] for key in sorted(inner)] if inner and all(type(key) is int for key in inner) else inner


# -- what stands for the classes that the metadata's pickle names ----------------------------------------------------
# ``args`` are the arguments of the class, and ``state`` is that of ``__setstate__``.


def _check_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or any(type(n) is not int or not 0 <= n < 2**60 for n in value):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(value)


def _make_box(args: tuple[Any, ...], state: Any) -> Any:
    return _check_sizes(state["offsets"]), _check_sizes(state["sizes"])


def _make_dtype(args: tuple[Any, ...], state: Any) -> Any:
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is not a dtype")
    return dtype


def _make_entry(args: tuple[Any, ...], state: Any) -> _Entry:
    shape = _check_sizes(state["size"])
    if not is_shape(shape):
        raise ValueError(f"{shape!r} is not a shape")
    return _Entry(shape=shape, dtype=state["properties"], boxes=tuple(state["chunks"]))


def _make_index(args: tuple[Any, ...], state: Any) -> Any:
    offset = state.get("offset")
    return state["fqn"], None if offset is None else _check_sizes(offset)


def _make_file_range(args: tuple[Any, ...], state: Any) -> _FileRange:
    if state.get("transform_descriptors"):
        raise CheckpointValueError(
            f"data transformed by {', '.join(map(str, state['transform_descriptors']))}; save it without extensions"
        )
    start, length = _check_sizes((state["offset"], state["length"]))
    if not isinstance(state["relative_path"], str):
        raise TypeError("a path that is not a string")
    return _FileRange(path=state["relative_path"], start=start, length=length)


def _make_metadata(args: tuple[Any, ...], state: Any) -> _Metadata:
    paths = state.get("planner_data")
    return _Metadata(
        entries={str(name): entry for name, entry in state["state_dict_metadata"].items()},
        paths=paths if isinstance(paths, dict) else {},
        ranges=dict(state["storage_data"] or {}),
    )


_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS: dict[str, Make] = {
    f"{_CHECKPOINT}.metadata.Metadata": _make_metadata,
    f"{_CHECKPOINT}.metadata.MetadataIndex": _make_index,
    f"{_CHECKPOINT}.metadata.TensorStorageMetadata": _make_entry,
    f"{_CHECKPOINT}.metadata.ChunkStorageMetadata": _make_box,
    f"{_CHECKPOINT}.metadata.TensorProperties": _make_dtype,
    f"{_CHECKPOINT}.metadata.BytesStorageMetadata": lambda args, state: _Entry(),
    f"{_CHECKPOINT}.metadata.StorageMeta": lambda args, state: None,
    f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING": lambda args, state: None,
    f"{_CHECKPOINT}.filesystem._StorageInfo": _make_file_range,
    # where torch 2.0 had them
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _make_dtype,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": lambda args, state: None,
    "torch.serialization._get_layout": lambda args, state: None,
}
