"""Files and folders that take their place when they are complete, and not before."""

from __future__ import annotations

import os
import posixpath
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

from fsdp_core.checkpoint.storage.folder import Folder, StrPath, open_folder, sync_directory
from fsdp_core.checkpoint.storage.remedies import remedy
from fsdp_core.errors import CheckpointError, CheckpointExistsError

__all__ = ["OVERWRITE", "check_apart", "check_file", "check_folder", "named_errors", "new_file", "new_folder"]

OVERWRITE = "choose another path, or pass overwrite=True (--overwrite on the command line)"
"""What to do where something is in the way."""

_SHOWN = 5


def check_apart(out: StrPath, source: Folder) -> None:
    """Refuse to write to where the checkpoint lies that is read, inside it or around it.

    Raises:
        CheckpointExistsError: The paths overlap.
    """
    target = open_folder(out)
    here, there = (
        os.path.realpath(folder.root) if folder.local else str(folder).rstrip("/") for folder in (source, target)
    )
    if here == there:
        raise CheckpointExistsError(f"{target} is the checkpoint that is to be read: choose another path to write to")
    if there.startswith(f"{here}/"):
        raise CheckpointExistsError(
            f"{target} lies inside {source}, the checkpoint that is to be read: choose a path outside of it"
        )
    if here.startswith(f"{there.rstrip('/')}/"):
        raise CheckpointExistsError(
            f"{source}, the checkpoint that is to be read, lies inside {target}: choose another path to write to"
        )


def check_file(out: StrPath, *, overwrite: bool) -> None:
    """Refuse a path that no file may take.

    Raises:
        CheckpointExistsError: A folder is there, or without ``overwrite`` anything.
    """
    place = open_folder(out)
    kind = place.kind()
    if kind == "folder" or (kind == "link" and os.path.isdir(place.root)):
        raise CheckpointExistsError(f"{place} is a folder, and one file is to be written: choose another path")
    if kind != "missing" and not overwrite:
        raise CheckpointExistsError(f"{place} is there already: {OVERWRITE}")


@contextmanager
def new_file(out: StrPath) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place, and that of a file there, when the block ends without an error.

    Raises:
        CheckpointError: It can't be written; what was at ``out`` is still there.
    """
    place = open_folder(out)
    parent = replace(place, root=posixpath.dirname(place.root) or ".")
    name = posixpath.basename(place.root)
    # An object store shows an object when it is complete.
    written = f"{name}.{secrets.token_hex(6)}.partial" if place.local else name
    with named_errors(f"write {place}"):
        try:
            with parent.writing(written) as stream:
                yield stream
            if place.local:
                os.replace(parent.path(written), place.root)
                sync_directory(parent.root)
        except BaseException:
            if place.local:
                parent.remove(written)
            raise


def check_folder(out: StrPath, *, overwrite: bool, ours: str) -> None:
    """Refuse a path that no folder of files may take.

    Args:
        out: The path.
        overwrite: Whether a folder with such files alone may be replaced; in an object store, none may.
        ours: A regular expression of the names that such a folder's files have.

    Raises:
        CheckpointExistsError: Something is in the way.
    """
    place = open_folder(out)
    kind = place.kind()
    if kind == "missing" or (kind == "folder" and not place.files()):
        return
    if kind != "folder":
        raise CheckpointExistsError(f"{place} is a {kind}, and a folder is to be written: choose another path")
    foreign = [name for name in place.files() if not re.fullmatch(ours, name)]
    if foreign:
        shown = ", ".join(foreign[:_SHOWN]) + (f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else "")
        raise CheckpointExistsError(
            f"{place} is a folder with something else in it ({shown}), which is not replaced: choose another path, or "
            "move that away"
        )
    if not overwrite:
        raise CheckpointExistsError(f"{place} is there already: {OVERWRITE}")
    if not place.local:
        raise CheckpointExistsError(
            f"{place} is there already, and a folder in an object store can't be replaced in one step: remove it, or "
            "choose another path"
        )


@contextmanager
def new_folder(out: StrPath) -> Iterator[Folder]:
    """Give a folder to write to, which takes its place, and that of a folder there, when the block ends without error.

    In an object store, files are written where they belong, and removed if the block fails.

    Raises:
        CheckpointError: It can't be written; what was at ``out`` is still there.
    """
    final = open_folder(out)
    token = secrets.token_hex(6)
    folder = replace(final, root=f"{final.root}.{token}.partial") if final.local else final
    with named_errors(f"write {final}"):
        try:
            yield folder
            folder.sync()
            if final.local:
                _take_place(folder, final, aside=f"{final.root}.{token}.replaced")
        except BaseException:
            if folder.kind() == "folder":
                folder.remove_all()
            raise


def _take_place(folder: Folder, final: Folder, *, aside: str) -> None:
    if final.kind() == "missing" or not final.files():
        os.rename(folder.root, final.root)  # takes the place of an empty folder, too
    else:
        os.rename(final.root, aside)
        try:
            os.rename(folder.root, final.root)
        except BaseException:
            os.rename(aside, final.root)
            raise
        replace(final, root=aside).remove_all()
    sync_directory(os.path.dirname(final.root) or ".")


@contextmanager
def named_errors(doing: str) -> Iterator[None]:
    """Turn an error of a disk or an object store into one of ours.

    Args:
        doing: What can't be done then, for the message: ``"write /data/a.safetensors"``.

    Raises:
        CheckpointError: The block raised an :class:`OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"can't {doing}: {type(error).__name__}: {error}\n{remedy(error)}".rstrip()) from error
