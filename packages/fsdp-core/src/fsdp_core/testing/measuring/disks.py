"""Simulated disks that are slow, full or blocked, to test what a save does while it writes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pytest

from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder

__all__ = ["Disk", "disk"]

_PATIENCE = 60.0  # seconds; a test that forgets to open a disk fails, and does not hang


class Disk:
    """How this process writes the files of its checkpoints.

    Attributes:
        seconds: The time that each file takes.
        room: The free space in bytes; ``None`` for no limit.
        opened: Files are written while it is set.
        reached: Set once a file is to be written.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.room: int | None = None
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()

    def wait(self) -> None:
        """Wait until a file may be written."""
        self.reached.set()
        time.sleep(self.seconds)
        assert self.opened.wait(_PATIENCE), "the disk was not opened in time"

    def take(self, count: int) -> None:
        """Use up space for some bytes."""
        if self.room is not None:
            self.room -= count
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")


_lock = threading.Lock()
#: The shared disk and its patch, once for each context that is entered.
_users: list[tuple[Disk, pytest.MonkeyPatch]] = []


@contextmanager
def disk(*, seconds: float = 0.0, room: int | None = None, opened: bool = True) -> Iterator[Disk]:
    """A context in which this process writes checkpoints through a :class:`Disk`.

    Ranks that are threads share one disk: the first to enter sets it up, and the last to leave removes it.

    Args:
        seconds: The time that each file takes.
        room: The free space in bytes.
        opened: Whether files may be written from the start.
    """
    with _lock:
        if not _users:
            shared_disk = Disk()
            shared_disk.seconds, shared_disk.room = seconds, room
            if not opened:
                shared_disk.opened.clear()
            patch = pytest.MonkeyPatch()
            patch.setattr(Folder, "writing", _writing_through(shared_disk, Folder.writing))
        else:
            shared_disk, patch = _users[-1]
        _users.append((shared_disk, patch))
    try:
        yield shared_disk
    finally:
        with _lock:
            _users.pop()
            if not _users:
                patch.undo()


def _writing_through(shared_disk: Disk, writing: Any) -> Any:
    @contextmanager
    def writing_to_disk(folder: Folder, name: str) -> Iterator[BinaryIO]:
        shared_disk.wait()
        with writing(folder, name) as stream:
            yield cast("BinaryIO", _Stream(stream, shared_disk))

    return writing_to_disk


class _Stream:
    def __init__(self, stream: BinaryIO, shared_disk: Disk) -> None:
        self._stream, self._disk = stream, shared_disk

    def write(self, piece: Any) -> int:
        self._disk.take(len(piece))
        return self._stream.write(piece)
