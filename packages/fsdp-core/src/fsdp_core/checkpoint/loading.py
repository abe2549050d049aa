"""Loading: the nest that was saved, with a handle where each chunked tensor was; only what is asked for is read."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from fsdp_core.checkpoint.chunks import Chunk
from fsdp_core.checkpoint.dtypes import dtype_name
from fsdp_core.checkpoint.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.manifest import Manifest, StoredTensor
from fsdp_core.checkpoint.plain_data import decode
from fsdp_core.checkpoint.recognition import read_manifest
from fsdp_core.checkpoint.safetensors_file import FileTensor, parse_header, read_box
from fsdp_core.checkpoint.verify import verify as verify_files
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError

__all__ = ["SavedTensor", "load"]


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a checkpoint. Its bytes stay there until they are asked for.

    Attributes:
        key: Its key in the manifest, such as ``model/wte.weight``.
        shape: Its shape.
        dtype: Its dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    _stored: StoredTensor = field(repr=False)
    _files: _Files = field(repr=False)

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box.

        Args:
            offsets: Where the box begins, one number per dimension.
            lengths: Its shape.

        Returns:
            A new CPU tensor of shape ``lengths``.
        """
        out = torch.empty(tuple(lengths), dtype=self.dtype)
        self.read_into(Chunk(offsets=tuple(offsets), data=out))
        return out

    def full(self) -> Tensor:
        """Read the whole tensor into a new CPU tensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read_into(self, chunk: Chunk) -> None:
        """Read into a box, in place; its dtype and device may be others, and values are converted.

        Args:
            chunk: The box: where it begins in this tensor, and the memory to fill.

        Raises:
            CheckpointMismatchError: The box does not lie inside this tensor.
        """
        assert isinstance(chunk.data, Tensor)
        box = tuple(chunk.data.shape)
        if not len(box) == len(chunk.offsets) == len(self.shape) or any(
            offset < 0 or offset + length > size
            for offset, length, size in zip(chunk.offsets, box, self.shape, strict=True)
        ):
            raise CheckpointMismatchError(
                f"{self.key!r} has shape {self.shape}, so it has no box of shape {box} at {tuple(chunk.offsets)}"
            )
        for part in self._stored.chunks:
            low = [max(a, b) for a, b in zip(part.offsets, chunk.offsets, strict=True)]
            high = [
                min(a + m, b + n) for a, m, b, n in zip(part.offsets, part.lengths, chunk.offsets, box, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            source = tuple(a - o for a, o in zip(low, part.offsets, strict=True))
            with torch.no_grad():
                self._files.read(part.file, part.key, source, chunk.data.detach()[inside])


class _Files:
    """The safetensors files of a checkpoint: each header parsed once, each file opened when it is first read."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._headers: dict[str, dict[str, FileTensor]] = {}
        self._open: dict[str, BinaryIO] = {}
        self._lock = threading.Lock()

    def check(self, name: str, size: int) -> dict[str, FileTensor]:
        """The header of a file, read and checked once."""
        if name not in self._headers:
            self._headers[name] = parse_header(
                lambda start, end: self._folder.read(name, start, end), size, self._folder.path(name)
            )
        return self._headers[name]

    def read(self, name: str, key: str, offsets: tuple[int, ...], out: Tensor) -> None:
        """Read a box of a tensor in a file into ``out``."""

        def read_into(buffer: memoryview, start: int) -> None:
            if self._fill(name, buffer, start) != len(buffer):
                raise CheckpointFormatError(
                    f"{self._folder.path(name)} ended before byte {start + len(buffer)} while {key!r} was read: "
                    "it was changed since the load began. Load again, or load an earlier checkpoint."
                )

        read_box(read_into, self._headers[name][key], offsets, out)

    def _fill(self, name: str, buffer: memoryview, start: int) -> int:
        if not self._folder.local:
            data = self._folder.read(name, start, start + len(buffer))
            buffer[: len(data)] = data
            return len(data)
        filled = 0
        with self._lock:
            stream = self._stream(name)
            stream.seek(start)
            # One read of the operating system gives at most 2 GiB.
            while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):  # type: ignore[attr-defined]
                filled += count
        return filled

    def _stream(self, name: str) -> BinaryIO:
        if name not in self._open:
            self._open[name] = open(self._folder.path(name), "rb", buffering=0)  # noqa: SIM115 (closed below)
            weakref.finalize(self, self._open[name].close)
        return self._open[name]


def load(path: StrPath, *, verify: bool = False) -> dict[str, Any]:
    """Load a checkpoint folder: the nest that was saved, in which chunked tensors are still in the files.

    Every rank may call this, or one process alone; nothing in it waits for another rank. Nothing is unpickled, and
    nothing outside of the folder is read. Manifest, plain data, the size and the header of every file are checked
    before this returns, so a checkpoint with a missing or truncated file is refused before any weight has changed.

    Args:
        path: A local path or an fsspec URL.
        verify: Whether to read every byte once to compare the checksums, too.

    Returns:
        What was given to :func:`~fsdp_core.checkpoint.save`: a :class:`SavedTensor` where a DTensor, a chunked tensor,
        or a tensor of a model's or an optimizer's state was; plain tensors (on the CPU) and plain data elsewhere.

    Raises:
        CheckpointFormatError: There is no complete checkpoint that this version can read.
    """
    folder = open_folder(path)
    manifest = read_manifest(folder)
    files = _Files(folder)
    _check_files(folder, manifest, files)
    if verify:
        verify_files(path)
    tensors = {
        key: SavedTensor(key=key, shape=stored.shape, dtype=stored.dtype, _stored=stored, _files=files)
        for key, stored in manifest.tensors.items()
    }
    small = {} if manifest.state_tensors is None else files.check(
        manifest.state_tensors, manifest.files[manifest.state_tensors].size
    )  # fmt: skip

    def on_tensor(tag: str, name: Any) -> Any:
        if tag == "$saved" and isinstance(name, str) and (key := manifest.aliases.get(name, name)) in tensors:
            return tensors[key]
        if tag == "$tensor" and isinstance(name, str) and name in small and manifest.state_tensors is not None:
            tensor = torch.empty(small[name].shape, dtype=small[name].dtype)
            files.read(manifest.state_tensors, name, (0,) * tensor.ndim, tensor)
            return tensor
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} points to a tensor {name!r} that isn't there")

    state = _plain(folder, manifest)
    try:
        nest = decode(state, on_tensor)
    except RecursionError as error:
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} is nested too deeply") from error
    if not isinstance(nest, dict):
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} holds no state: {type(nest).__name__}")
    return nest


def _check_files(folder: Folder, manifest: Manifest, files: _Files) -> None:
    faults = []
    for name, entry in manifest.files.items():
        size = folder.size(name)
        if size is None:
            faults.append(f"{name} is missing")
        elif size != entry.size:
            faults.append(f"{name} has {size} bytes instead of {entry.size}")
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:20])
        more = f"\n  … and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CheckpointFormatError(
            f"the checkpoint {folder} is damaged:{shown}{more}\nRestore these files, or load an earlier checkpoint."
        )
    for key, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            found = files.check(chunk.file, manifest.files[chunk.file].size).get(chunk.key)
            if found is None or found.shape != chunk.lengths or found.dtype != tensor.dtype:
                holds = "nothing by that name" if found is None else f"{found.shape} {dtype_name(found.dtype)}"
                raise CheckpointFormatError(
                    f"the checkpoint {folder} is damaged: {key!r} should be {chunk.key!r} in {chunk.file}, of shape "
                    f"{chunk.lengths} and {dtype_name(tensor.dtype)}, but the file holds {holds}"
                )


def _plain(folder: Folder, manifest: Manifest) -> Any:
    text = folder.read(manifest.state_file)
    checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(text)}"
    try:
        if checksum != manifest.files[manifest.state_file].checksum:
            raise ValueError(f"its checksum is {checksum}, and the manifest says otherwise: it was changed")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"can't read {folder.path(manifest.state_file)}: {error}") from error
