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
from typing import Any, BinaryIO, Literal, cast

from fsdp_core.checkpoint.remedies import unreadable
from fsdp_core.errors import CheckpointError, CheckpointFormatError

__all__ = ["Folder", "StrPath", "open_folder", "sync_directory"]

StrPath = str | os.PathLike[str]

_PIECE_BYTES = 8 * 2**20


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
        """What lies at this folder's path; a link stays a link, whatever it points to.

        Raises:
            CheckpointFormatError: This user may not look there.
        """
        if self.local:
            try:
                if stat.S_ISLNK(os.lstat(self.root).st_mode):
                    return "link"
            except PermissionError as error:
                raise unreadable(self.root, error) from error
            except OSError:
                return "missing"
        if not self.fs.exists(self.root):
            return "missing"
        return "folder" if self.fs.isdir(self.root) else "file"

    def files(self) -> list[str]:
        """The names of all files in it, at any depth, sorted.

        Raises:
            CheckpointFormatError: This user may not list it.
        """
        if not self.local:
            prefix = self.root.rstrip("/") + "/"
            found = [str(path).removeprefix(prefix) for path in self.fs.find(self.root)]
            # A name that ends in a slash is what a web console puts in the place of an empty folder.
            return sorted(name for name in found if name and not name.endswith("/"))
        found = list[str]()
        for folder, folders, names in os.walk(self.root, onerror=_refuse_closed):
            # A link to a folder is listed, not followed: what lies behind it is not in here.
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            found += [os.path.relpath(os.path.join(folder, name), self.root) for name in names + links]
        return sorted(path.replace(os.sep, "/") for path in found)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or ``None`` where there is no regular file inside the folder.

        Raises:
            CheckpointFormatError: The name leads out of the folder through a link, or this user may not look there.
        """
        path = self.path(name)
        if not self.local:
            try:
                entry = self.fs.info(path)
            except FileNotFoundError:
                return None
            return int(entry["size"]) if entry["type"] == "file" else None
        root, real = os.path.realpath(self.root), os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise CheckpointFormatError(
                f"{name!r} in {self} is a link to {real}, outside of the checkpoint. Nothing was read from it."
            )
        try:
            status = os.stat(path)
        except PermissionError as error:
            raise unreadable(path, error) from error
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
        """Open a new file for writing; when the block ends, its bytes are on the disk or in the object store.

        Raises:
            CheckpointError: A link leads out of the folder, where no reader would follow.
        """
        path = self.path(name)
        if not self.local:
            with _uploading(self.fs, path) as stream:
                yield stream
            return
        parent = os.path.dirname(path)
        root, real = os.path.realpath(self.root), os.path.realpath(parent)
        if os.path.commonpath([root, real]) != root:
            raise CheckpointError(
                f"can't write {name!r} in {self}: {parent} is a link to {real}, outside of the checkpoint, and no load "
                "would follow it.\nSave to another path, or link the whole folder instead."
            )
        os.makedirs(parent, exist_ok=True)
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
            self._outdate_listings()
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
            sync_directory(folder)
        sync_directory(os.path.dirname(self.root) or ".")

    def remove(self, name: str) -> None:
        """Remove a file; it may be gone already."""
        if self.local:
            with suppress(FileNotFoundError):
                os.unlink(self.path(name))
        else:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))
            self._outdate_listings()

    def _outdate_listings(self) -> None:
        """Let the program's other filesystems, such as a ModelCheckpoint's, forget what they have listed here."""
        for other in list(getattr(type(self.fs), "_cache", {}).values()):
            other.invalidate_cache(self.root)

    def remove_empty(self) -> None:
        """Remove the folders in it that hold nothing, and then the folder itself if it holds nothing."""
        if not self.local:
            is_bucket = "/" not in self.root.strip("/")
            if not is_bucket and self.fs.isdir(self.root) and not self.files():
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
        sync_directory(os.path.dirname(other.root) or ".")

    def interrupted_beside(self) -> list[Folder]:
        """The folders that interrupted saves to this path have left beside it. Local filesystems only."""
        if not self.local:
            return []
        parent, own = os.path.split(self.root)
        pattern = re.compile(re.escape(own) + r"\.[0-9a-f]{12}\.partial")
        paths = [os.path.join(parent, name) for name in os.listdir(parent) if pattern.fullmatch(name)]
        return [replace(self, root=path) for path in paths if os.path.isdir(path) and not os.path.islink(path)]

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""
        if self.local:
            shutil.rmtree(self.root)
        else:
            self.fs.rm(self.root, recursive=True)


def _refuse_closed(error: OSError) -> None:
    """Stop listing at a folder that this user may not list; one that another process has removed holds nothing."""
    if isinstance(error, PermissionError):
        raise unreadable(str(error.filename), error) from error


def open_folder(path: StrPath) -> Folder:
    """The folder at a local path or an fsspec URL; nothing is read or created.

    Raises:
        CheckpointError: The URL's file system is not known or not installed.

    Example:
        >>> open_folder("memory://runs/last").local
        False
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        # Filesystems remember what they have listed, and so don't see what other ranks have written since.
        fs, root = fsspec.core.url_to_fs(os.fspath(path), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"can't open {os.fspath(path)}: {error}. Use a local path, or a URL of a file system that is installed "
            "(fsspec.available_protocols() lists those that fsspec knows)."
        ) from error
    return Folder(fs=fs, root=str(root).rstrip("/") or "/", local=isinstance(fs, LocalFileSystem))


@contextmanager
def _uploading(fs: Any, path: str) -> Iterator[BinaryIO]:
    try:
        stream = fs.open(path, "wb")
    except FileNotFoundError:
        # Only some filesystems have folders. Where none are needed, to make one may mean to create a bucket.
        fs.makedirs(posixpath.dirname(path), exist_ok=True)
        stream = fs.open(path, "wb")
    try:
        yield cast("BinaryIO", _Pieces(stream))
        stream.close()
    except BaseException:
        # Closing would publish what has been written so far as a whole object.
        with suppress(Exception):
            stream.discard()
        with suppress(AttributeError):
            stream.closed = True
        raise


class _Pieces:
    """A stream that passes on a few MiB at a time, for the streams of fsspec copy all that they are given at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.name = str(getattr(stream, "path", ""))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            self._stream.write(view[start : start + _PIECE_BYTES])
        return len(view)


def sync_directory(path: str) -> None:
    """Put the names in a local folder on the disk."""
    if os.name != "posix":  # elsewhere a folder can't be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
