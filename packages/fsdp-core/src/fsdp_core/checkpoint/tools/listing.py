"""Lists the checkpoints in a directory: complete, damaged, and left by interrupted saves."""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from fsdp_core.checkpoint.format.file_names import is_ours, save_id_of
from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.part_recognition import describe_part, describe_rest, holds_rank_record
from fsdp_core.checkpoint.storage.plain_json import part_at, read_plain
from fsdp_core.checkpoint.storage.recognition import holds_manifest, is_interrupted, read_manifest
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.checkpoint.storage.rereading import read_again
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.writers import Writer, writer_of, writers_in
from fsdp_core.errors import CheckpointError, CheckpointFormatError

__all__ = ["ListedCheckpoint", "State", "find_checkpoints"]

State = Literal["whole", "damaged", "unfinished", "scattered"]
"""``unfinished``: an interrupted or running save or removal. ``scattered``: files of it are in other places."""

#: The keys that lead to the step in a checkpoint of the Trainer, and in those of scripts with Fabric.
_STEPS = (["trainer", "global_step"], ["global_step"], ["step"])


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint in a directory, or the remains of one.

    Attributes:
        path: Its path.
        state: ``"whole"`` if all files of the manifest exist with the right sizes. Contents are not compared.
        step: The Trainer's global step at which it was saved. If a script has saved it by Fabric, the integer under the
            key ``"global_step"`` or ``"step"``, if there is one.
        nbytes: The size of its files in bytes.
        time: When it was saved; for an unfinished one, when a file was last written.
        remark: The fault, or the writer.
    """

    path: str
    state: State
    step: int | None
    nbytes: int
    time: datetime | None
    remark: str


def find_checkpoints(path: StrPath) -> list[ListedCheckpoint]:
    """Find the checkpoints of this format in a directory, not in its subdirectories.

    Args:
        path: A local path or an fsspec URL of a directory.

    Returns:
        The checkpoints, oldest first. Files, links and other folders are omitted.

    Raises:
        CheckpointError: The directory does not exist or can't be read.
    """
    parent = open_folder(path)
    try:
        if not parent.fs.isdir(parent.root):
            raise CheckpointError(f"{parent} is not a directory. Check the path.")
        if holds_manifest(parent):
            raise CheckpointError(
                f"{parent} is a checkpoint itself. Type `fsdp checkpoint inspect {parent}`, or list its parent "
                "directory."
            )
        entries = [str(entry["name"]).rstrip("/") for entry in parent.fs.ls(parent.root, detail=True)]
    except OSError as error:
        reason = f"{type(error).__name__}: {error}. {remedy(error)}".rstrip()
        raise CheckpointError(f"can't list {parent}: {reason}") from error
    folders = [replace(parent, root=root) for root in entries]
    checkpoints = [checkpoint for checkpoint in map(_examine, folders) if checkpoint is not None]
    return sorted(
        checkpoints, key=lambda checkpoint: (checkpoint.time or datetime.max.replace(tzinfo=UTC), checkpoint.path)
    )


def _examine(folder: Folder) -> ListedCheckpoint | None:
    if folder.kind() != "folder":
        return None
    writer = writer_of(posixpath.basename(folder.root.replace("\\", "/")))
    if writer is None and folder.size(MANIFEST) is not None:
        return _describe_complete(folder) if holds_manifest(folder) else None
    names = folder.files()
    part = None if writer is not None or MANIFEST in names else describe_part(folder, names)
    if part is None and writer is None and not (names and is_interrupted(folder)):
        return None
    writers = writers_in(names, writer)
    sizes = [folder.size(name) or 0 for name in names if is_ours(name)]
    times = [_modification_time(folder, name) for name in names]
    sentences = [] if part is None else [_in_one_line(part)]
    if writers or part is None:
        sentences.append(_describe_writers(writers))
    return ListedCheckpoint(
        path=str(folder),
        state="unfinished" if part is None or not holds_rank_record(names) else "scattered",
        step=None,
        nbytes=sum(sizes),
        time=max((time for time in times if time is not None), default=None),
        remark=" ".join(sentences),
    )


def _describe_complete(folder: Folder) -> ListedCheckpoint:
    """Describe a folder with a manifest, whatever else is there."""
    read = partial(_compare_with_manifest, folder)
    try:
        return read_again([folder], read, is_intact=lambda checkpoint: checkpoint.state == "whole")
    except CheckpointFormatError as error:
        return ListedCheckpoint(
            path=str(folder),
            state="damaged",
            step=None,
            nbytes=0,
            time=_modification_time(folder, MANIFEST),
            remark=str(error),
        )


def _compare_with_manifest(folder: Folder) -> ListedCheckpoint:
    files = StoredFiles(folder, read_manifest(folder))
    manifest = files.manifest
    sizes = {name: folder.size(name) for name in manifest.files}
    wrong_files = [name for name, entry in manifest.files.items() if sizes[name] != entry.size]
    state: State = "damaged" if wrong_files else "whole"
    remark = f"by {manifest.strategy}"
    if wrong_files and manifest.places and all(sizes[name] is None for name in wrong_files):
        state = "scattered"  # what is missing is in places that ranks on other hosts wrote to
        remark = _in_one_line(describe_rest(folder, manifest, wrong_files))
    elif wrong_files:
        listed = ", ".join(wrong_files[:3]) + (f" and {len(wrong_files) - 3} more" if len(wrong_files) > 3 else "")
        remark = f"missing, or of another size: {listed}"
    names_of_saves = [name for name in folder.files() if save_id_of(name) is not None]
    sizes_of_other_saves = {name: folder.size(name) or 0 for name in names_of_saves if name not in manifest.files}
    if sizes_of_other_saves:
        remark += f"; {len(sizes_of_other_saves)} files of other saves lie in it too"
    plain = None if manifest.state_file in wrong_files else read_plain(files)
    steps = [] if plain is None else [part_at(plain, keys) for keys in _STEPS]
    return ListedCheckpoint(
        path=str(folder),
        state=state,
        step=next((step for step in steps if type(step) is int), None),
        nbytes=sum(size or 0 for size in [*sizes.values(), *sizes_of_other_saves.values()]),
        time=_parse_time(manifest.created),
        remark=remark,
    )


def _in_one_line(text: str) -> str:
    """Join the lines of a message. The indented entries of a list end with a semicolon."""
    return " ".join(f"{line.strip()};" if line.startswith("  ") else line for line in text.splitlines())


def _describe_writers(writers: Collection[Writer]) -> str:
    if not writers:
        return "its writer is not recorded"
    sentence_of_state = {
        "gone": "by {}, which is gone: the next save to this directory removes it",
        "lives": "by {}, which is running",
        "unknown": "by {}, which may or may not be running",
    }
    return "; ".join(sentence_of_state[writer.standing()].format(writer) for writer in writers)


def _parse_time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _modification_time(folder: Folder, name: str) -> datetime | None:
    try:
        time: datetime = folder.fs.modified(folder.path(name))
    except (OSError, NotImplementedError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
