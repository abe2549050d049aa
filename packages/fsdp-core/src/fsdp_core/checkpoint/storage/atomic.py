"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
import posixpath
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder, sync_directory
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.errors import CheckpointError, CheckpointExistsError

__all__ = [
    "OVERWRITE",
    "NewFolder",
    "check_apart",
    "check_file",
    "check_folder",
    "named_errors",
    "new_file",
    "new_folder",
]

OVERWRITE = "choose another path, or pass overwrite=True (--overwrite on the command line)"
"""The remedy in errors about an existing path."""

_MOST_SHOWN = 5


def check_apart(out: StrPath, source: Folder) -> None:
    """Refuse an output path that equals, lies inside or contains the path of the checkpoint that is read.

    Raises:
        CheckpointExistsError: The paths overlap.
    """
    target = open_folder(out)
    source_path = _comparable_path(source)
    target_path = _comparable_path(target)
    if source_path == target_path:
        raise CheckpointExistsError(f"{target} is the checkpoint to be read: choose another path to write to")
    if target_path.startswith(f"{source_path}/"):
        raise CheckpointExistsError(
            f"{target} lies inside {source}, the checkpoint to be read: choose a path outside of it"
        )
    if source_path.startswith(f"{target_path.rstrip('/')}/"):
        raise CheckpointExistsError(
            f"{source}, the checkpoint to be read, lies inside {target}: choose another path to write to"
        )


def _comparable_path(folder: Folder) -> str:
    return os.path.realpath(folder.root) if folder.local else str(folder).rstrip("/")


def check_file(out: StrPath, *, overwrite: bool) -> None:
    """Refuse a path where a file must not be written.

    Raises:
        CheckpointExistsError: The path is a folder, or exists and ``overwrite`` is false.
    """
    target = open_folder(out)
    target_type = target.kind()
    if target_type == "folder" or (target_type == "link" and os.path.isdir(target.root)):
        raise CheckpointExistsError(f"{target} is a folder, and the output is one file: choose another path")
    if target_type != "missing" and not overwrite:
        raise CheckpointExistsError(f"{target} already exists: {OVERWRITE}")


@contextmanager
def new_file(out: StrPath) -> Iterator[BinaryIO]:
    """Open a file for writing, and move it to its path when the block ends without an error, replacing a file there.

    Raises:
        CheckpointError: It can't be written; the previous content of ``out`` is unchanged.
    """
    target = open_folder(out)
    parent = replace(target, root=posixpath.dirname(target.root) or ".")
    name = posixpath.basename(target.root)
    # In an object store, an object becomes visible when it is complete.
    temporary_name = f"{name}.{secrets.token_hex(6)}.partial" if target.local else name
    with named_errors(f"write {target}"):
        try:
            with parent.writing(temporary_name) as stream:
                yield stream
            if target.local:
                os.replace(parent.path(temporary_name), target.root)
                sync_directory(parent.root)
        except BaseException:
            if target.local:
                parent.remove(temporary_name)
            raise


def check_folder(out: StrPath, *, overwrite: bool, own_files: str) -> None:
    """Refuse a path where a folder of files must not be written.

    Args:
        out: The path.
        overwrite: Whether a local folder whose files all match ``own_files`` may be replaced.
        own_files: A regular expression for the names of the files in a folder that may be replaced.

    Raises:
        CheckpointExistsError: The path holds something that must not be replaced.
    """
    target = open_folder(out)
    target_type = target.kind()
    if target_type == "missing" or (target_type == "folder" and not target.files()):
        return
    if target_type != "folder":
        raise CheckpointExistsError(f"{target} is a {target_type}, and the output is a folder: choose another path")
    _refuse_foreign(target, own_files, str(target))
    if not overwrite:
        raise CheckpointExistsError(f"{target} already exists: {OVERWRITE}")
    if not target.local:
        raise CheckpointExistsError(
            f"{target} already exists, and a folder in an object store can't be replaced atomically: remove it, or "
            "choose another path"
        )


def _refuse_foreign(folder: Folder, own_files: str, name: str) -> None:
    foreign_files = [file for file in folder.files() if not re.fullmatch(own_files, file)]
    if foreign_files:
        more = f" and {len(foreign_files) - _MOST_SHOWN} more" if len(foreign_files) > _MOST_SHOWN else ""
        listed = ", ".join(foreign_files[:_MOST_SHOWN]) + more
        raise CheckpointExistsError(
            f"{name} is a folder with something else in it ({listed}), which is not replaced: choose another path, or "
            "move that away"
        )


@contextmanager
def new_folder(out: StrPath, *, overwrite: bool, own_files: str) -> Iterator[Folder]:
    """Yield a folder to write to, and move it to its path when the block ends without error.

    In an object store, files are written to their final path, and removed if the block fails.

    Args:
        out: The path.
        overwrite: As in :func:`check_folder`, which is to be called before.
        own_files: As in :func:`check_folder`.

    Raises:
        CheckpointExistsError: Something has appeared there since, which must not be replaced.
        CheckpointError: It can't be written; the previous content of ``out`` is unchanged.
    """
    folder_to_write = NewFolder.of(out)
    with named_errors(f"write {folder_to_write.final}"):
        try:
            yield folder_to_write.folder
            folder_to_write.publish(overwrite=overwrite, own_files=own_files)
        except BaseException:
            folder_to_write.discard()
            raise


@dataclass(frozen=True, kw_only=True)
class NewFolder:
    """A folder that is written beside its path and moved there: :func:`new_folder`, in steps that several ranks take.

    Attributes:
        final: The folder at its path.
        folder: The folder to write to.
        token: A name that no other writer has.
    """

    final: Folder
    folder: Folder
    token: str

    @classmethod
    def of(cls, out: StrPath, token: str | None = None) -> NewFolder:
        """A folder at a path. Ranks that pass the same token write to the same folder."""
        final = open_folder(out)
        token = token or secrets.token_hex(6)
        folder = replace(final, root=f"{final.root}.{token}.partial") if final.local else final
        return cls(final=final, folder=folder, token=token)

    def publish(self, *, overwrite: bool, own_files: str) -> None:
        """Move the folder to its final path, where there may be an empty folder.

        Args:
            overwrite: As in :func:`check_folder`.
            own_files: As in :func:`check_folder`.

        Raises:
            CheckpointExistsError: Something else is there by now. It is unchanged.
        """
        self.folder.sync()
        if self.final.local:
            aside = f"{self.final.root}.{self.token}.replaced"
            _move_to_final(self.folder, self.final, aside, own_files if overwrite else None)

    def discard(self) -> None:
        """Remove what was written."""
        if self.folder.kind() == "folder":
            self.folder.remove_all()


def _move_to_final(folder: Folder, final: Folder, aside: str, replaceable: str | None) -> None:
    """Move a new folder to its final path, and remove the one that it replaces.

    Args:
        folder: The new folder.
        final: The final path.
        aside: Where the former folder is until the new one is in place.
        replaceable: A regular expression for the names of files that may be replaced; ``None`` if none may be.
    """
    try:
        folder.move_to(final, aside=aside, expected=None)
        return
    except FileExistsError as error:
        if replaceable is None or final.kind() != "folder":
            raise CheckpointExistsError(
                f"{final} did not exist, or was empty, when this was begun, and another job has put something there "
                "since, which is not replaced: choose another path"
            ) from error
    os.rename(final.root, aside)
    former_folder = replace(final, root=aside)
    try:
        _refuse_foreign(former_folder, replaceable, str(final))  # it may have changed since check_folder()
        try:
            folder.move_to(final, aside=aside, expected=None)
        except FileExistsError as error:
            raise CheckpointExistsError(
                f"another job has written {final} while this one was replacing it; what it was to replace is "
                f"{aside}.\nGive each job paths of its own."
            ) from error
    except BaseException:
        with suppress(OSError):  # a new owner of the path keeps it
            os.rename(aside, final.root)
        raise
    former_folder.remove_all()
    sync_directory(os.path.dirname(final.root) or ".")


@contextmanager
def named_errors(action: str) -> Iterator[None]:
    """Convert an error of a disk or an object store to a :class:`~fsdp_core.errors.CheckpointError`.

    Args:
        action: The operation, for the message: ``"write /data/a.safetensors"``.

    Raises:
        CheckpointError: The block raised an :class:`OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"can't {action}: {type(error).__name__}: {error}\n{remedy(error)}".rstrip()) from error
