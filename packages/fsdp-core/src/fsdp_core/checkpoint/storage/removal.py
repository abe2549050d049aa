"""Removes a checkpoint, and nothing else."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import replace

from fsdp_core.checkpoint.format.file_names import is_ours, save_id_of
from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.recognition import holds_manifest, manifest_bytes, save_id_in
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.checkpoint.storage.writers import Writer, new_writer, writer_of, writers_by_name, writing
from fsdp_core.errors import CheckpointError, CheckpointExistsError

__all__ = ["remove"]


def remove(path: StrPath) -> None:
    """Remove a checkpoint: a folder of this format (also of an interrupted save), a single file, or a link to either.

    The manifest is removed first, so an interrupted removal does not leave a partial checkpoint that looks complete. Of
    a link, only the link is removed. Files in the folder that no save has written are kept. Does nothing if the path
    does not exist. One rank calls this; of a scattered save, one rank of each host, which may do so at once.

    Args:
        path: A local path or an fsspec URL.

    Raises:
        CheckpointExistsError: The path is a folder of something else; nothing was removed.
        CheckpointError: The file system refused; files that were removed before, the manifest first, stay removed.
    """
    folder = open_folder(path)
    try:
        _remove(folder)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"can't remove {folder}: {type(error).__name__}: {error}. {remedy(error)}".rstrip()
        ) from error


def _remove(folder: Folder) -> None:
    entry_type = folder.kind()
    if entry_type == "missing":
        return
    if entry_type in ("file", "link"):
        with suppress(FileNotFoundError):  # another rank was faster
            folder.remove_link_or_file()
        return
    remover = new_writer(secrets.token_hex(6))
    with writing(remover):
        with folder.locked():  # otherwise a save might commit in between
            if folder.kind() == "missing":  # another rank was faster
                return
            names = folder.files()
            if not holds_manifest(folder) and not (names and all(map(is_ours, names)) and MANIFEST not in names):
                shown_names = ", ".join(names[:5]) or "nothing"
                raise CheckpointExistsError(
                    f"{folder} is not a checkpoint of this format (in it: {shown_names}), so it was not removed: "
                    "check the path, or remove it by hand"
                )
            writers = writers_by_name(names).values()
            # Files of saves that are still running are kept, because these saves will commit.
            running_saves = {writer.save_id for writer in writers if writer.standing() == "lives"}
            removed_save = save_id_in(manifest_bytes(folder) or b"")
            if removed_save is not None:
                remover = replace(remover, replaces=removed_save)
            if folder.local and not running_saves and all(map(is_ours, names)) and _move_aside(folder, remover):
                folder = replace(folder, root=os.path.join(os.path.dirname(folder.root), remover.partial))
            elif folder.kind() == "missing":  # another rank was faster, where there are no locks
                return
            else:
                folder.mark(remover.mark)
                folder.remove(MANIFEST)
                names.append(remover.mark)
        for name in sorted(names, key=lambda name: writer_of(name) is not None):  # marks of writers last
            writer = writer_of(name)
            save_id = save_id_of(name) if writer is None else writer.save_id
            if is_ours(name) and save_id not in running_saves:
                folder.remove(name)
        folder.remove_empty()


def _move_aside(folder: Folder, remover: Writer) -> bool:
    """Hide the folder from searches by renaming it atomically, and return whether that was possible."""
    try:
        os.rename(folder.root, os.path.join(os.path.dirname(folder.root), remover.partial))
    except OSError:  # a mount point, or a parent that this user may not write to
        return False
    return True
