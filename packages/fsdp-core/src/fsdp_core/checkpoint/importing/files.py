"""The files that an import reads, by byte ranges, all inside the folder of the source."""

from __future__ import annotations

import io
import os
import posixpath
import re
from dataclasses import dataclass, field, replace

from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.remedies import unreadable
from fsdp_core.errors import CheckpointFormatError

__all__ = ["FileWindow", "SourceFile", "open_file", "source_of"]

_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a source.

    Attributes:
        folder: Its folder.
        name: Its name in the folder.
        size: Its size in bytes.
    """

    folder: Folder = field(repr=False)
    name: str
    size: int

    def __str__(self) -> str:
        return self.folder.path(self.name)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``.

        Raises:
            CheckpointFormatError: The file ends before, or this user may not read it.
        """
        try:
            data = self.folder.read(self.name, start, end)
        except PermissionError as error:
            raise unreadable(str(self), error) from error
        if len(data) != end - start:
            raise CheckpointFormatError(f"{self} ends before byte {end}: it is truncated. Restore it from a backup.")
        return data

    def fill(self, buffer: memoryview, start: int) -> None:
        """Read into a buffer, block by block for a local file, so that the intermediate copy stays small."""
        block = _BLOCK_BYTES if self.folder.local else max(len(buffer), 1)
        for offset in range(0, len(buffer), block):
            end = min(offset + block, len(buffer))
            buffer[offset:end] = self.read(start + offset, start + end)


def source_of(path: StrPath) -> tuple[Folder, str | None]:
    """Return the folder of a source, and the file's name if the source is a single file.

    Raises:
        CheckpointFormatError: The path does not exist.
    """
    folder = open_folder(path)
    if folder.local:  # the user's own path may be a link; links inside of the folder must not leave it
        folder = replace(folder, root=os.path.realpath(folder.root))
    source_type = folder.kind()
    if source_type == "missing":
        raise CheckpointFormatError(f"nothing to import at {folder}: there is nothing. Check the path.")
    if source_type == "folder":
        return folder, None
    return replace(folder, root=posixpath.dirname(folder.root) or "/"), posixpath.basename(folder.root)


def open_file(folder: Folder, name: str) -> SourceFile:
    """Return a file of a folder by a name from the source itself, which is not trusted.

    Raises:
        CheckpointFormatError: The name leads out of the folder, this user may not access the file, or it does not
        exist.
    """
    if any(part in ("", ".", "..") for part in name.split("/")) or re.search(r"[\\:\x00-\x1f]", name):
        raise CheckpointFormatError(
            f"{folder} names a file {name!r} outside of itself, and nothing was read from it.\n"
            "Import a folder that you trust."
        )
    target = folder.target_outside(name)
    if target is not None:
        raise CheckpointFormatError(
            f"{name!r} in {folder} is a link to {target}, outside of the source. Nothing was read from it.\n"
            f"Type `cp -rL {folder} COPY` and import COPY."
        )
    size = folder.size(name)
    if size is None:
        raise CheckpointFormatError(f"{folder.path(name)} is missing: the source is not complete. Restore the file.")
    return SourceFile(folder=folder, name=name, size=size)


class FileWindow(io.RawIOBase):
    """A range of a file as a readable and seekable stream."""

    def __init__(self, file: SourceFile, start: int, end: int) -> None:
        if not 0 <= start <= end <= file.size:
            raise CheckpointFormatError(f"{file} has {file.size} bytes, and no range from {start} to {end}")
        self._file = file
        self._start = start
        self._end = end
        self._position = start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        if base + offset < self._start:
            raise ValueError("a position before the beginning")
        self._position = base + offset
        return self._position - self._start

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return max(0, self._end - self._position)

    def tell(self) -> int:
        return self._position - self._start

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self.left)
        if count:
            buffer[:count] = self._file.read(self._position, self._position + count)
        self._position += count
        return count
