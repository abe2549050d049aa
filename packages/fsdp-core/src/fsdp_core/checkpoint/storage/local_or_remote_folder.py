"""The folder of a checkpoint, on a local disk or at any fsspec URL: its files, and the replacement of its manifest."""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal, cast

from fsdp_core.checkpoint.storage.remedies import unreadable
from fsdp_core.errors import CheckpointError, CheckpointFormatError

__all__ = ["Folder", "StrPath", "open_folder", "sync_directory"]

StrPath = str | os.PathLike[str]

_PIECE_BYTES = 8 * 2**20
_ATTEMPTS = 5
_LOCK_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of files, which may not exist yet. Files are named by relative paths with ``/``.

    Attributes:
        fs: The fsspec filesystem.
        root: The folder's path in that filesystem.
        local: Whether it is on the local filesystem, which requires syncing and may hold links.
    """

    fs: Any
    root: str
    local: bool

    def __str__(self) -> str:
        return self.root if self.local else str(self.fs.unstrip_protocol(self.root))

    def path(self, name: str) -> str:
        """Return the path of a file in this folder."""
        return posixpath.join(self.root, name)

    def kind(self) -> Literal["missing", "file", "link", "folder"]:
        """Return what exists at this folder's path; a link is not followed.

        Raises:
            CheckpointFormatError: This user may not access the path.
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
        """Return the names of all files in it, at any depth, sorted.

        Raises:
            CheckpointFormatError: This user may not list it.
        """
        if not self.local:
            prefix = self.root.rstrip("/") + "/"
            paths = [str(path).removeprefix(prefix) for path in self.fs.find(self.root)]
            # A name that ends in a slash is a web console's placeholder for an empty folder.
            return sorted(name for name in paths if name and not name.endswith("/"))
        paths = list[str]()
        for folder, folders, names in os.walk(self.root, onerror=_refuse_unlistable):
            # A link to a folder is listed, not followed: its target is not part of this folder.
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            paths += [os.path.relpath(os.path.join(folder, name), self.root) for name in names + links]
        return sorted(path.replace(os.sep, "/") for path in paths)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or ``None`` if it is not a regular file inside the folder.

        Raises:
            CheckpointFormatError: A link leads out of the folder, or this user may not access the file.
        """
        path = self.path(name)
        if not self.local:
            try:
                entry = self.fs.info(path)
            except FileNotFoundError:
                return None
            return int(entry["size"]) if entry["type"] == "file" else None
        target = self.target_outside(name)
        if target is not None:
            raise CheckpointFormatError(
                f"{name!r} in {self} is a link to {target}, outside of the checkpoint. Nothing was read from it."
            )
        try:
            status = os.stat(path)
        except PermissionError as error:
            raise unreadable(path, error) from error
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def target_outside(self, name: str) -> str | None:
        """Return the path outside of the folder to which a link at ``name`` leads; ``None`` if none does."""
        if not self.local:
            return None
        root = os.path.realpath(self.root)
        target = os.path.realpath(self.path(name))
        return None if os.path.commonpath([root, target]) == root else target

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``."""
        if not self.local:
            return bytes(self.fs.cat_file(self.path(name), start=start, end=end))
        with open(self.path(name), "rb") as stream:
            stream.seek(start)
            return stream.read() if end is None else stream.read(end - start)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; when the block ends, its bytes are on the disk or in the object store.

        Raises:
            CheckpointError: A link leads out of the folder, which no reader would follow.
        """
        path = self.path(name)
        if not self.local:
            with _uploading(self.fs, path) as stream:
                yield stream
            return
        target = self.target_outside(posixpath.dirname(name))
        if target is not None:
            raise CheckpointError(
                f"can't write {name!r} in {self}: {os.path.dirname(path)} is a link to {target}, outside of "
                "the checkpoint, which no load would follow.\nSave to another path, or link the whole folder instead."
            )
        with _create_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def commit(self, name: str, data: bytes, *, temporary: str) -> None:
        """Replace the content of the file ``name`` atomically: readers see either the old content or the new.

        Args:
            name: The file to replace.
            data: Its new content.
            temporary: The name to write it to first, on filesystems with a rename. Object stores don't need it, because
                putting an object replaces it atomically.
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
        """Sync the directory entries to disk, so that they survive a power failure."""
        if not self.local:
            return
        for folder, _, _ in os.walk(self.root):
            sync_directory(folder)
        sync_directory(os.path.dirname(self.root) or ".")

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        if self.local:
            with suppress(FileNotFoundError):
                os.unlink(self.path(name))
        else:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))
            self._outdate_listings()

    def _outdate_listings(self) -> None:
        """Invalidate cached listings of this folder in other filesystem instances, such as a ModelCheckpoint's."""
        for instance in list(getattr(type(self.fs), "_cache", {}).values()):
            instance.invalidate_cache(self.root)

    def mark(self, name: str) -> None:
        """Create an empty file atomically. It need not survive a power failure."""
        if self.local:
            _create_file(self.path(name)).close()
            return
        with _uploading(self.fs, self.path(name)):
            pass

    def remove_empty(self) -> None:
        """Remove empty subfolders, and then the folder itself if it is empty."""
        if not self.local:
            is_bucket = "/" not in self.root.strip("/")
            if not is_bucket and self.fs.isdir(self.root) and not self.files():
                self.fs.rm(self.root, recursive=True)
            return
        for folder, _, _ in os.walk(self.root, topdown=False):
            with suppress(FileNotFoundError):
                if not os.listdir(folder):
                    with _ignore_not_empty():
                        os.rmdir(folder)

    def remove_link_or_file(self) -> None:
        """Remove the file or link at this folder's path."""
        if self.local:
            os.unlink(self.root)
        else:
            self.fs.rm_file(self.root)

    @property
    def parent(self) -> Folder | None:
        """The parent folder; ``None`` for a bucket."""
        parent = os.path.dirname(self.root) if self.local else posixpath.dirname(self.root.rstrip("/"))
        if not self.local and not parent.strip("/"):
            return None
        return replace(self, root=parent or ".")

    def identity(self) -> tuple[int, int] | None:
        """Return the identity of the file or link at this folder's path. Local filesystems only."""
        try:
            status = os.lstat(self.root)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the parent folder for the block, where locks are available.

        Object stores have no locks, and some network filesystems have none for folders. The block must be safe without
        the lock; with it, the order of two processes is known.
        """
        descriptor = _lock_folder(os.path.dirname(self.root) or ".") if self.local and os.name == "posix" else None
        try:
            yield
        finally:
            if descriptor is not None:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may also hold the descriptor
                os.close(descriptor)

    def move_to(self, target: Folder, *, aside: str, expected: tuple[int, int] | None, keep: bool = False) -> None:
        """Move this folder to another path. Local filesystems only.

        Args:
            target: The path: nothing is there, an empty folder, a file or a link.
            aside: The path to which a file or a link at the target is moved before this folder takes its place.
            expected: The identity of that file or link; ``None`` if there is none.
            keep: Whether that file or link stays at ``aside`` afterwards; otherwise it is removed.

        Raises:
            FileExistsError: Something else is at the target by now, and is kept.
        """
        if expected is None:
            self._rename_to(target)
        else:
            if target.identity() != expected:
                raise FileExistsError(errno.EEXIST, "another file has taken the place", target.root)
            try:
                os.rename(target.root, aside)
            except FileNotFoundError as error:
                raise FileExistsError(errno.EEXIST, "another save has moved it away", target.root) from error
            try:
                if replace(target, root=aside).identity() != expected:
                    raise FileExistsError(errno.EEXIST, "another file has taken the place", target.root)
                self._rename_to(target)
            except BaseException:
                with suppress(FileExistsError, IsADirectoryError):  # a new owner of the path keeps it
                    os.rename(aside, target.root)
                raise
            if not keep:
                os.unlink(aside)
        sync_directory(os.path.dirname(target.root) or ".")

    def _rename_to(self, target: Folder) -> None:
        try:
            os.rename(self.root, target.root)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "another folder has taken the place", target.root) from error
            raise

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""
        if self.local:
            shutil.rmtree(self.root)
        else:
            self.fs.rm(self.root, recursive=True)


def _refuse_unlistable(error: OSError) -> None:
    """Refuse a folder that this user may not list; a folder that another process has removed counts as empty."""
    if isinstance(error, PermissionError):
        raise unreadable(str(error.filename), error) from error


def open_folder(path: StrPath) -> Folder:
    """Return the folder at a local path or an fsspec URL; nothing is read or created.

    Raises:
        CheckpointError: The URL's file system is not known or not installed.

    Example:
        >>> open_folder("memory://runs/last").local
        False
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        # Filesystems cache listings, and so don't see files that other ranks have written since.
        fs, root = fsspec.core.url_to_fs(os.fspath(path), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"can't open {os.fspath(path)}: {error}. Use a local path, or a URL of a file system that is installed "
            "(fsspec.available_protocols() lists the known ones)."
        ) from error
    return Folder(fs=fs, root=str(root).rstrip("/") or "/", local=isinstance(fs, LocalFileSystem))


def _create_file(path: str) -> BinaryIO:
    """Create a new file and its folder, again if another process has removed the folder while it was empty."""
    for attempt in range(_ATTEMPTS):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            return open(path, "xb", buffering=2**20)
        except FileNotFoundError:
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


@contextmanager
def _ignore_not_empty() -> Iterator[None]:
    """Ignore that a folder can't be removed because another process has put something into it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _lock_folder(path: str) -> int | None:
    """Lock a folder, and return its open descriptor, or ``None`` if locking is not possible."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            is_locked_by_other = isinstance(error, BlockingIOError)  # else this file system has no locks for folders
            if not is_locked_by_other or time.monotonic() >= deadline:
                os.close(descriptor)
                return None
        time.sleep(0.005)


@contextmanager
def _uploading(fs: Any, path: str) -> Iterator[BinaryIO]:
    try:
        stream = fs.open(path, "wb")
    except FileNotFoundError:
        # Only some filesystems have folders. In others, makedirs may create a bucket.
        fs.makedirs(posixpath.dirname(path), exist_ok=True)
        stream = fs.open(path, "wb")
    try:
        yield cast("BinaryIO", _Pieces(stream))
        stream.close()
    except BaseException:
        # Closing would commit the partial content as a complete object.
        with suppress(Exception):
            stream.discard()
        with suppress(AttributeError):
            stream.closed = True
        raise


class _Pieces:
    """A stream that writes a few MiB at a time, because fsspec's streams copy everything passed to one write."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.name = str(getattr(stream, "path", ""))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            self._stream.write(view[start : start + _PIECE_BYTES])
        return len(view)


def sync_directory(path: str) -> None:
    """Sync the entries of a local folder to disk."""
    if os.name != "posix":  # on other systems a folder can't be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
