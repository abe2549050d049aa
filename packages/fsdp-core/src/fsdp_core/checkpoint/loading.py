"""Loading: the nest that was saved, with a handle where each chunked tensor was; only what is asked for is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.collective import together
from fsdp_core.checkpoint.format.manifest import StoredTensor
from fsdp_core.checkpoint.format.plain_data import decode
from fsdp_core.checkpoint.storage.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.plain_json import read_plain
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.rereading import ATTEMPTS, pause, seen, too_often
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.verifying import find_damage, refuse_damage, share_of
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import Chunk
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["load", "verify_tensors"]


def load(path: StrPath, *, runtime: Runtime | None = None, verify: bool = True) -> dict[str, Any]:
    """Load a checkpoint folder: the nest that was saved, in which chunked tensors are still in the files.

    Every byte is compared with the manifest before this returns, so that a damaged checkpoint is refused before any
    weight has changed. Nothing is unpickled, and nothing outside of the folder is read. If another run saves there
    meanwhile, the load begins anew; on a local disk, what it returns can then be read to its end.

    Args:
        path: A local path or an fsspec URL.
        runtime: The ranks, which must then all call this: they divide the files between them, so that each byte is
            verified once, and what one of them finds is raised on all. Without it, nothing in this waits for another
            rank: one process may call it alone, and whoever calls it verifies all files.
        verify: Whether to compare all checksums, which reads every byte once. Otherwise only those of the plain data
            and of the tensors in it are, and the sizes and headers of the other files.

    Returns:
        What was given to :func:`~fsdp_core.checkpoint.save`: a handle
        (:class:`~fsdp_core.checkpoint.SavedTensor`) where a DTensor, a chunked tensor, or a tensor of a model's or an
        optimizer's state was; plain tensors (on the CPU) and plain data elsewhere.

    Raises:
        CheckpointFormatError: There is no complete checkpoint that this version can read, or it is damaged; what is
            wrong with which file is in the message.
    """
    folder = open_folder(path)
    doing = f"loading {os.fspath(path)}"
    for attempt in range(ATTEMPTS):
        reading = _Reading(folder, runtime, checksums=verify)
        examined = together(runtime, doing, reading.examine)
        alike = len({save_id for save_id, _, _ in examined}) == 1
        if alike and not any(replaced for _, _, replaced in examined):
            refuse_damage(folder, {name: fault for _, faults, _ in examined for name, fault in faults.items()})
            if all(together(runtime, doing, reading.decode)):
                return reading.nest
        pause(attempt)
    if alike:
        raise too_often([folder])
    raise CheckpointFormatError(
        f"the ranks read different checkpoints at {folder}: another run is replacing it, or it lies on disks that "
        "the hosts don't share. Load it when no run saves to it, from a file system that all ranks share."
    )


@dataclass(frozen=True, kw_only=True)
class _BoxesInFiles:
    """The boxes of one tensor in the files that a manifest names."""

    stored: StoredTensor
    files: StoredFiles

    def read_into(self, chunk: Chunk) -> None:
        assert isinstance(chunk.data, Tensor)
        box = tuple(chunk.data.shape)
        for part in self.stored.chunks:
            low = [max(a, b) for a, b in zip(part.offsets, chunk.offsets, strict=True)]
            high = [
                min(a + m, b + n) for a, m, b, n in zip(part.offsets, part.lengths, chunk.offsets, box, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            source = tuple(a - o for a, o in zip(low, part.offsets, strict=True))
            with torch.no_grad():
                self.files.read(part.file, part.key, source, chunk.data.detach()[inside])


class _Reading:
    """One attempt of one rank to load a checkpoint, of which all ranks must take each step."""

    def __init__(self, folder: Folder, runtime: Runtime | None, *, checksums: bool) -> None:
        self._folder, self._runtime, self._checksums = folder, runtime, checksums
        self._before = seen(folder)
        self._files: StoredFiles | None = None
        self.nest: dict[str, Any] = {}

    def examine(self) -> tuple[str, dict[str, str], bool]:
        """The save that was read, what is wrong with this rank's files, and whether another save has replaced it."""
        manifest, runtime = read_manifest(self._folder), self._runtime
        self._files = StoredFiles(self._folder, manifest)
        mine = manifest.files if runtime is None else share_of(manifest.files, runtime.rank, runtime.world_size)
        faults = find_damage(self._files, mine, checksums=self._checksums)
        return manifest.save_id, faults, bool(faults) and self._replaced()

    def decode(self) -> bool:
        """Whether the plain data could be read, and nothing has replaced the checkpoint before it was."""
        assert self._files is not None
        try:
            self._files.keep_open()
            self.nest = _decode(self._files)
        except (CheckpointFormatError, OSError):
            if not self._replaced():
                raise
            return False
        return True

    def _replaced(self) -> bool:
        return seen(self._folder) != self._before


def verify_tensors(nest: Any) -> None:
    """Compare the checksums of the files that the saved tensors of a nest lie in, and of no others.

    Args:
        nest: What :func:`load` gave, or a part of it.

    Raises:
        CheckpointFormatError: They are damaged; the message names the files.
    """
    names: dict[StoredFiles, set[str]] = {}
    _note_files(nest, names)
    for files, own in names.items():
        refuse_damage(files.folder, find_damage(files, sorted(own)))


def _note_files(nest: Any, names: dict[StoredFiles, set[str]]) -> None:
    if isinstance(nest, SavedTensor):
        boxes = nest._boxes
        assert isinstance(boxes, _BoxesInFiles)
        names.setdefault(boxes.files, set()).update(chunk.file for chunk in boxes.stored.chunks)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            _note_files(value, names)
    elif isinstance(nest, list | tuple):
        for value in nest:
            _note_files(value, names)


def _decode(files: StoredFiles) -> dict[str, Any]:
    """The plain data with its tensors, and handles on the others."""
    folder, manifest = files.folder, files.manifest
    tensors = {
        key: SavedTensor(
            key=key, shape=stored.shape, dtype=stored.dtype, _boxes=_BoxesInFiles(stored=stored, files=files)
        )
        for key, stored in manifest.tensors.items()
    }
    small = {} if manifest.state_tensors is None else dict(files.header(manifest.state_tensors))

    def on_tensor(tag: str, name: Any) -> Any:
        if tag == "$saved" and isinstance(name, str) and (key := manifest.aliases.get(name, name)) in tensors:
            return tensors[key]
        if tag == "$tensor" and isinstance(name, str) and name in small and manifest.state_tensors is not None:
            where = small.pop(name)  # once, or a small file could ask for any amount of memory
            tensor = torch.empty(where.shape, dtype=where.dtype)
            files.read(manifest.state_tensors, name, (0,) * tensor.ndim, tensor)
            return tensor
        raise CheckpointFormatError(
            f"{folder.path(manifest.state_file)} points to a tensor {name!r} that isn't there, or points to it twice"
        )

    state = read_plain(files)
    try:
        nest = decode(state, on_tensor)
    except RecursionError as error:
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} is nested too deeply") from error
    if not isinstance(nest, dict):
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} holds no state: {type(nest).__name__}")
    return nest
