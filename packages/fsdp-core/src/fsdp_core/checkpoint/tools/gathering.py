"""Joins the places of a scattered save: one folder with all of its files, which any load reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import xxhash

from fsdp_core.checkpoint.format.file_names import save_id_of
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest
from fsdp_core.checkpoint.storage.atomic import check_apart, named_errors
from fsdp_core.checkpoint.storage.commit import choose_target
from fsdp_core.checkpoint.storage.joined_folder import JoinedFolder, Paths, open_places
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.writers import writing
from fsdp_core.checkpoint.tools.conversion import OnProgress, counter
from fsdp_core.checkpoint.tools.resharding import check_target
from fsdp_core.checkpoint.verifying import find_damage, refuse_damage
from fsdp_core.errors import CheckpointExistsError, CheckpointFormatError

__all__ = ["Gathered", "gather"]

_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What :func:`gather` has done.

    Attributes:
        manifest: The manifest of the checkpoint.
        linked: How many files are hard links to those of the places, which take no further room.
        copied: How many were copied.
        duplicates: The places of each file that several places hold, by the file's name.
        damaged: The fault of each file that was replaced by a good one from another place, by its path.
    """

    manifest: Manifest
    linked: int
    copied: int
    duplicates: dict[str, list[str]]
    damaged: dict[str, str]


def gather(
    places: Paths,
    out: StrPath,
    *,
    overwrite: bool = False,
    copy: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Gathered:
    """Join the places of a scattered save.

    Files that lie on the disk of ``out`` are hard-linked, which takes no time and no room: files of a checkpoint are
    never changed, so the places and ``out`` may be removed independently. Others are copied, a few MiB at a time. The
    manifest is written last. torch is not imported.

    Args:
        places: The places, local paths or fsspec URLs, in any order: all of them, or one folder that holds all.
        out: The folder to write: a local path or an fsspec URL.
        overwrite: Whether to replace a checkpoint of another save at ``out``, once the new one is complete.
        copy: Whether to copy all files.
        verify: Whether to compare every byte with its checksum first; otherwise, sizes and headers.
        on_progress: Called with the progress.

    Returns:
        What was done.

    Raises:
        CheckpointFormatError: Places are of different saves, or files are missing or damaged; the message says which
            ranks wrote them, on which host and where.
        CheckpointExistsError: ``out`` holds something that must not be replaced; nothing was written.
        CheckpointError: ``out`` can't be written; its previous content is unchanged.
    """
    folder = open_places(places)
    manifest = read_manifest(folder)
    sources = folder.places if isinstance(folder, JoinedFolder) else (folder,)
    for source in sources:
        check_apart(out, source)
    target = open_folder(out)
    check_target(target, overwrite=overwrite)
    if target.kind() == "folder" and any(save_id_of(name) == manifest.save_id for name in target.files()):
        raise CheckpointExistsError(
            f"{target} holds files of the same save {manifest.save_id} already, and files are never changed: choose "
            "another path, or remove it"
        )
    size = sum(entry.size for entry in manifest.files.values())
    on_bytes = counter(2 * size if verify else size, on_progress)  # each byte is written, and may be verified before
    files = StoredFiles(folder, manifest)
    damaged = _choose_undamaged(files, verify=verify, on_bytes=on_bytes)
    duplicates = {}
    if isinstance(folder, JoinedFolder):
        places_of_file = {name: folder.places_with(name) for name in manifest.files}
        duplicates = {
            name: [str(folder.places[number]) for number in numbers]
            for name, numbers in places_of_file.items()
            if len(numbers) > 1
        }
    # File names contain the save's id, so the new checkpoint keeps it.
    save_target = choose_target(out, manifest.save_id, overwrite=True)
    new_manifest = replace(manifest, places=())
    linked = 0
    data: bytes | None = None
    with named_errors(f"write {target}"), writing(save_target.writer):
        try:
            save_target.begin()
            for name, entry in manifest.files.items():
                source = folder.place_to_read(name) if isinstance(folder, JoinedFolder) else folder
                if not copy and _link(source, save_target.folder, name):
                    linked += 1
                    on_bytes(entry.size)
                else:
                    _copy(source, save_target.folder, name, entry, on_bytes)
            data = new_manifest.to_json().encode()
            previous = save_target.commit(data, new_manifest.files)
        except BaseException:
            with suppress(OSError):
                if save_target.may_remove_files(data):
                    save_target.remove_files()
                    save_target.remove_marks()
            raise
        save_target.remove_leftovers(data, previous)
    return Gathered(
        manifest=new_manifest,
        linked=linked,
        copied=len(manifest.files) - linked,
        duplicates=duplicates,
        damaged=damaged,
    )


def _choose_undamaged(files: StoredFiles, *, verify: bool, on_bytes: Callable[[int], None]) -> dict[str, str]:
    """Choose for each file a place that has it undamaged, and return the faults of those that were passed over.

    Raises:
        CheckpointFormatError: There is none for some file.
    """
    folder = files.folder
    damaged = dict[str, str]()
    names = list(files.manifest.files)
    while names:
        faults = find_damage(
            files, names, checksums=verify, on_bytes=(lambda name, count: on_bytes(count)) if verify else None
        )
        names = []
        if isinstance(folder, JoinedFolder):
            for name in list(faults):
                places_with_file = folder.places_with(name)
                damaged_place = folder.chosen_places.get(name, places_with_file[0])
                later_places = [number for number in places_with_file if number > damaged_place]
                if later_places:
                    damaged[folder.path(name)] = faults.pop(name)
                    folder.chosen_places[name] = later_places[0]
                    files.forget(name)
                    names.append(name)
        refuse_damage(files, faults)
    return damaged


def _link(source: Folder, target: Folder, name: str) -> bool:
    """Hard-link a file, and return whether the file systems permit it."""
    if not (source.local and target.local) or not hasattr(os, "link"):
        return False
    path = target.path(name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.link(os.path.realpath(source.path(name)), path)  # realpath, since a place may contain symbolic links
    except FileExistsError:
        raise  # a copy would fail, too
    except OSError:  # other disks, or a file system without hard links
        return False
    return True


def _copy(source: Folder, target: Folder, name: str, entry: FileEntry, on_bytes: Callable[[int], None]) -> None:
    digest = xxhash.xxh3_64()
    with target.writing(name) as stream:
        for start in range(0, entry.size, _BLOCK_BYTES):
            block = source.read(name, start, min(start + _BLOCK_BYTES, entry.size))
            digest.update(block)
            stream.write(block)
            on_bytes(len(block))
        if f"xxh3:{digest.hexdigest()}" != entry.checksum:
            raise CheckpointFormatError(
                f"{source.path(name)} has changed while it was copied, or is damaged. Gather again."
            )
