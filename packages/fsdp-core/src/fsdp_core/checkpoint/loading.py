"""Loads checkpoints: the nested state, with a handle for each chunked tensor; tensors are read only when needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.collective import run_on_all, total
from fsdp_core.checkpoint.format.manifest import Manifest, StoredTensor
from fsdp_core.checkpoint.format.plain_data import decode
from fsdp_core.checkpoint.storage.joined_folder import Paths, open_places, shown_paths
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.plain_json import read_plain
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.rereading import ATTEMPTS, current_fingerprint, pause, replaced_too_often
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.verifying import find_damage, refuse_damage, share_of
from fsdp_core.errors import CheckpointFormatError
from fsdp_core.runtime import Runtime
from fsdp_core.state.boxes import overlap
from fsdp_core.state.chunks import Chunk
from fsdp_core.state.dtypes import DTYPES
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["load", "verify_tensors"]


def load(path: Paths, *, runtime: Runtime | None = None, verify: bool = True) -> dict[str, Any]:
    """Load a checkpoint folder as the nest that was saved. Chunked tensors stay in the files.

    Every byte is compared with the manifest before this returns, so a damaged checkpoint is refused before any weight
    changes. Nothing is unpickled, and nothing outside of the folder is read. If another run saves there in the
    meantime, the load starts again; on a local disk, tensors of the result stay readable if that happens later.

    Args:
        path: A local path or an fsspec URL; or several, the places of a scattered save, each of which every rank sees.
        runtime: The ranks, which must all call this. They divide the files between them, so that each byte is verified
            once, and a fault that one rank finds is raised on all. Without it, no rank waits for another: a single
            process may call this, and each caller verifies all files.
        verify: Whether to compare all checksums, which reads every byte once. Otherwise, only those of the plain data
            and its tensors are compared, and the sizes and headers of the other files.

    Returns:
        The state that was passed to :func:`~fsdp_core.checkpoint.save`, with a handle
        (:class:`~fsdp_core.checkpoint.SavedTensor`) for each DTensor, chunked tensor, and tensor of a model's or an
        optimizer's state, and with plain tensors (on the CPU) and plain data elsewhere. A handle to a tensor that the
        checkpoint leaves out has its ``digest``, and can't be read.

    Raises:
        CheckpointFormatError: There is no complete checkpoint that this version can read, or it is damaged; the message
            names the files and their faults.
    """
    action = f"loading {shown_paths(path)}"
    if isinstance(path, str | os.PathLike):  # opening a single path reads nothing, so no rank can fail alone
        folder = open_places(path)
    else:
        folder = run_on_all(runtime, action, lambda: open_places(path))
    for attempt in range(ATTEMPTS):
        load_attempt = _LoadAttempt(folder, runtime, checksums=verify)
        found = run_on_all(runtime, action, load_attempt.examine)
        save_id_of_first = found.save_id if runtime is None else runtime.broadcast_object(found.save_id)
        differing_ranks, ranks_that_saw_replacement, ranks_with_faults = total(
            runtime, [found.save_id != save_id_of_first, found.is_replaced, bool(found.faults)]
        )
        all_agree = not differing_ranks
        if all_agree and not ranks_that_saw_replacement:
            faults = found.faults
            if ranks_with_faults and runtime is not None:  # each rank raises the faults of all
                for faults_of_rank in runtime.gather_objects(found.faults):
                    faults = {**faults, **faults_of_rank}
            refuse_damage(load_attempt.files, faults)
            is_decoded = run_on_all(runtime, action, load_attempt.decode)
            (undecoded_ranks,) = total(runtime, [not is_decoded])
            if not undecoded_ranks:
                return load_attempt.nest
        pause(attempt)
    if all_agree:  # at the last attempt
        raise replaced_too_often([folder])
    raise CheckpointFormatError(
        f"the ranks read different checkpoints at {folder}: another run is replacing it, or it is on disks that "
        "the hosts don't share. Load it when no run saves to it, from a file system that all ranks share."
    )


@dataclass(frozen=True, kw_only=True)
class _BoxesInFiles:
    """The boxes of one tensor in the files of a checkpoint."""

    stored: StoredTensor
    files: StoredFiles

    def read_into(self, chunk: Chunk) -> None:
        assert isinstance(chunk.data, Tensor)
        chunk_lengths = tuple(chunk.data.shape)
        for part in self.stored.overlapping((chunk.offsets, chunk_lengths)):
            common = overlap((part.offsets, part.lengths), (chunk.offsets, chunk_lengths))
            assert common is not None
            begins, lengths = common
            starts_in_chunk = [begin - offset for begin, offset in zip(begins, chunk.offsets, strict=True)]
            starts_in_part = tuple(begin - offset for begin, offset in zip(begins, part.offsets, strict=True))
            inside = tuple(slice(start, start + length) for start, length in zip(starts_in_chunk, lengths, strict=True))
            with torch.no_grad():
                self.files.read(part.file, part.key, starts_in_part, chunk.data.detach()[inside])


@dataclass(frozen=True, kw_only=True)
class _LeftOutBoxes:
    """The boxes of a tensor that a checkpoint leaves out, which nothing can be read from."""

    key: str
    path: str
    manifest: Manifest

    def read_into(self, chunk: Chunk) -> None:
        from fsdp_core.checkpoint.left_out.named_base import refusal_without_base

        raise refusal_without_base(
            self.path,
            self.manifest,
            [self.key],
            f"Load it into a module that was built from the base; name the base with base= or frozen_base=; or type: "
            f"fsdp checkpoint consolidate {self.path} OUT --with-base BASE",
        )


@dataclass(frozen=True, kw_only=True)
class _Examination:
    """What a rank finds in a checkpoint before it is loaded.

    Attributes:
        save_id: The id of the save.
        faults: By file, what is wrong with it.
        is_replaced: Whether that is because another save has replaced the checkpoint.
    """

    save_id: str
    faults: dict[str, str]
    is_replaced: bool


class _LoadAttempt:
    """One attempt of this rank to load a checkpoint. All ranks must take each step."""

    def __init__(self, folder: Folder, runtime: Runtime | None, *, checksums: bool) -> None:
        self._folder = folder
        self._runtime = runtime
        self._checksums = checksums
        self._fingerprint_at_start = current_fingerprint(folder)
        self._files: StoredFiles | None = None
        self.nest: dict[str, Any] = {}

    def examine(self) -> _Examination:
        """Read the manifest, and compare this rank's share of the files with it."""
        manifest = read_manifest(self._folder)
        runtime = self._runtime
        self._files = StoredFiles(self._folder, manifest)
        own_files = manifest.files if runtime is None else share_of(manifest.files, runtime.rank, runtime.world_size)
        faults = find_damage(self._files, own_files, checksums=self._checksums)
        return _Examination(save_id=manifest.save_id, faults=faults, is_replaced=bool(faults) and self._is_replaced())

    @property
    def files(self) -> StoredFiles:
        """The files that were examined."""
        assert self._files is not None
        return self._files

    def decode(self) -> bool:
        """Decode the plain data, and return whether that succeeded; ``False`` if the checkpoint was replaced before."""
        try:
            self.files.keep_open()
            self.nest = _decode(self.files)
        except (CheckpointFormatError, OSError):
            if not self._is_replaced():
                raise
            return False
        return True

    def _is_replaced(self) -> bool:
        return current_fingerprint(self._folder) != self._fingerprint_at_start


def verify_tensors(nest: Any) -> None:
    """Compare the checksums of the files that hold the saved tensors of a nest, and of no others.

    Args:
        nest: The result of :func:`load`, or a part of it.

    Raises:
        CheckpointFormatError: Files are damaged; the message names them.
    """
    names_by_checkpoint: dict[StoredFiles, set[str]] = {}
    for boxes in _boxes_in(nest):
        names_by_checkpoint.setdefault(boxes.files, set()).update(boxes.stored.file_names())
    for files, file_names in names_by_checkpoint.items():
        refuse_damage(files, find_damage(files, sorted(file_names)))


def _boxes_in(nest: Any) -> Iterator[_BoxesInFiles]:
    """Yield the boxes of each saved tensor in a nest."""
    if isinstance(nest, SavedTensor):
        boxes = nest._boxes
        if nest.digest is None:
            assert isinstance(boxes, _BoxesInFiles)
            yield boxes
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from _boxes_in(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from _boxes_in(value)


def _decode(files: StoredFiles) -> dict[str, Any]:
    """Decode the plain data and its tensors, with handles for the other tensors."""
    folder, manifest = files.folder, files.manifest
    tensors = {
        key: SavedTensor(
            key=key, shape=stored.shape, dtype=stored.dtype, _boxes=_BoxesInFiles(stored=stored, files=files)
        )
        for key, stored in manifest.tensors.items()
    }
    for key, absent in manifest.left_out.items():
        boxes = _LeftOutBoxes(key=key, path=str(folder), manifest=manifest)
        dtype = DTYPES[absent.dtype_name]
        tensors[key] = SavedTensor(key=key, shape=absent.shape, dtype=dtype, digest=absent.digest, _boxes=boxes)
    unread_tensors = {} if manifest.state_tensors is None else dict(files.header(manifest.state_tensors))

    def on_tensor(tag: str, name: Any) -> Any:
        key = manifest.aliases.get(name, name) if isinstance(name, str) else None
        if tag == "$saved" and key in tensors:
            return tensors[key]
        if tag == "$tensor" and isinstance(name, str) and name in unread_tensors and manifest.state_tensors is not None:
            entry = unread_tensors.pop(name)  # only once, or a small file could make this allocate any amount of memory
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            files.read(manifest.state_tensors, name, (0,) * tensor.ndim, tensor)
            return tensor
        raise CheckpointFormatError(
            f"{folder.path(manifest.state_file)} refers to a tensor {name!r} that does not exist, or refers to it twice"
        )

    state = read_plain(files)
    try:
        nest = decode(state, on_tensor)
    except RecursionError as error:
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} is nested too deeply") from error
    if not isinstance(nest, dict):
        raise CheckpointFormatError(f"{folder.path(manifest.state_file)} holds no state, but {type(nest).__name__}")
    return nest
