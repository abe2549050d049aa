"""The folder of a checkpoint, on a local disk or behind any fsspec URL: its files, and how its manifest is replaced."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

from fsdp_core.errors import CheckpointFormatError

__all__ = ["Folder", "StrPath", "open_folder"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A place for files, which may not exist yet. Files are named by relative paths with ``/``.

    Attributes:
        fs: The fsspec filesystem.
        root: The folder's path in that filesystem.
        local: Whether it lies on this machine's own filesystem, which needs syncing and may hold links.
    """

    fs: Any
    root: str
    local: bool

    def __str__(self) -> str:
        return self.root if self.local else str(self.fs.unstrip_protocol(self.root))

    def path(self, name: str) -> str:
        """The path of a file in this folder."""
        return posixpath.join(self.root, name)

    def kind(self) -> Literal["missing", "file", "link", "folder"]:
        """What lies at this folder's path; a link stays a link, whatever it points to."""
        if self.local and os.path.islink(self.root):
            return "link"
        if not self.fs.exists(self.root):
            return "missing"
        return "folder" if self.fs.isdir(self.root) else "file"

    def files(self) -> list[str]:
        """The names of all files in it, at any depth, sorted."""
        if not self.local:
            prefix = self.root.rstrip("/") + "/"
            return sorted(str(path).removeprefix(prefix) for path in self.fs.find(self.root))
        found = []
        for folder, folders, names in os.walk(self.root):
            # A link to a folder is listed, not followed: what lies behind it is not in here.
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            found += [os.path.relpath(os.path.join(folder, name), self.root) for name in names + links]
        return sorted(path.replace(os.sep, "/") for path in found)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or ``None`` where there is no regular file inside the folder.

        Raises:
            CheckpointFormatError: The name leads out of the folder through a link.
        """
        path = self.path(name)
        if not self.local:
            return int(self.fs.size(path)) if self.fs.isfile(path) else None
        root, real = os.path.realpath(self.root), os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise CheckpointFormatError(
                f"{name!r} in {self} is a link to {real}, outside of the checkpoint. Nothing was read from it."
            )
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file from ``start`` to ``end``."""
        if not self.local:
            return bytes(self.fs.cat_file(self.path(name), start=start, end=end))
        with open(self.path(name), "rb") as stream:
            stream.seek(start)
            return stream.read() if end is None else stream.read(end - start)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; when the block ends, its bytes are on the disk."""
        path = self.path(name)
        if not self.local:
            self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
            with self.fs.open(path, "wb") as stream:
                yield stream
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, name: str, data: bytes, *, temporary: str) -> None:
        """Give the file ``name`` the content ``data`` in one step: readers see the old content or the new.

        Args:
            name: The file to replace.
            data: Its new content.
            temporary: Where to write it first, on a filesystem that has a rename. An object store needs none, for
                putting an object replaces it whole.
        """
        if not self.local:
            self.fs.pipe_file(self.path(name), data)
            return
        with self.writing(temporary) as stream:
            stream.write(data)
        self.sync()
        os.replace(self.path(temporary), self.path(name))
        self.sync()

    def sync(self) -> None:
        """Put the names of the files on the disk, so that they outlive a power cut."""
        if not self.local:
            return
        for folder, _, _ in os.walk(self.root):
            _sync_directory(folder)
        _sync_directory(os.path.dirname(self.root) or ".")

    def remove(self, name: str) -> None:
        """Remove a file; it may be gone already."""
        if self.local:
            with suppress(FileNotFoundError):
                os.unlink(self.path(name))
        elif self.fs.exists(self.path(name)):
            self.fs.rm_file(self.path(name))

    def remove_empty(self) -> None:
        """Remove the folders in it that hold nothing, and then the folder itself if it holds nothing."""
        if not self.local:
            if self.fs.isdir(self.root) and not self.files():
                self.fs.rm(self.root, recursive=True)
            return
        for folder, _, _ in os.walk(self.root, topdown=False):
            if not os.listdir(folder):
                os.rmdir(folder)

    def remove_link_or_file(self) -> None:
        """Remove what lies at this folder's path, where it is a file or a link."""
        if self.local:
            os.unlink(self.root)
        else:
            self.fs.rm_file(self.root)

    def move_to(self, other: Folder, *, aside: str) -> None:
        """Put this folder in the place of the file or link at ``other``. Local filesystems only.

        Args:
            other: Where it goes.
            aside: Where the file waits until this folder is in its place.
        """
        os.rename(other.root, aside)
        try:
            os.rename(self.root, other.root)
        except BaseException:
            os.rename(aside, other.root)
            raise
        os.unlink(aside)
        _sync_directory(os.path.dirname(other.root) or ".")

    def interrupted_beside(self) -> list[Folder]:
        """The folders that interrupted saves to this path have left beside it. Local filesystems only."""
        if not self.local:
            return []
        parent, own = os.path.split(self.root)
        pattern = re.compile(re.escape(own) + r"\.[0-9a-f]{12}\.partial")
        names = [name for name in os.listdir(parent) if pattern.fullmatch(name)]
        return [replace(self, root=os.path.join(parent, name)) for name in names]

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""
        if self.local:
            shutil.rmtree(self.root)
        else:
            self.fs.rm(self.root, recursive=True)


def open_folder(path: StrPath) -> Folder:
    """The folder at a local path or an fsspec URL; nothing is read or created.

    Example:
        >>> open_folder("memory://runs/last").local
        False
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fs, root = fsspec.core.url_to_fs(os.fspath(path))
    return Folder(fs=fs, root=str(root).rstrip("/") or "/", local=isinstance(fs, LocalFileSystem))


def _sync_directory(path: str) -> None:
    if os.name != "posix":  # elsewhere a folder can't be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
