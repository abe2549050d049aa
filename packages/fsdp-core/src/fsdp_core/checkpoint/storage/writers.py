"""Writers of unfinished saves: how they are recorded in file names, and whether the process is provably gone."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import xxhash

from fsdp_core.checkpoint.format.file_names import WRITER_TOKEN

__all__ = ["Standing", "Writer", "new_writer", "writer_of", "writers_by_name", "writers_in", "writing"]

Standing = Literal["gone", "lives", "unknown"]
"""The status of a save's writer, as known to this process."""

_NAMED = re.compile(rf"\.(?:writer|partial)-(?P<token>{WRITER_TOKEN})")
_NO_SAVE = "0" * 12

#: The saves and removals that are running in this process.
_running_saves: set[str] = set()

#: The system id where the system has no boot id. No other process has the same.
_fallback_system = secrets.token_hex(6)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The writer of a save. It is encoded in a file name, which is created atomically, so it is never read partially.

    Attributes:
        save_id: The save's id.
        replaces: The id of the save that it replaces; zeros if it replaces none.
        system: Identifies one boot of one machine and one PID namespace.
        pid: The process id.
        started: The start time of the process, in the system's units, because process ids are reused.
        host: The host name, for people.
    """

    save_id: str
    replaces: str
    system: str
    pid: int
    started: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'a host without a name'}"

    @property
    def mark(self) -> str:
        """The name of the empty file that records the writer in the folder that is written to."""
        return f".writer-{self._token}"

    @property
    def partial(self) -> str:
        """The name of the folder that is written to, next to the path.

        It contains nothing by which checkpoints are searched for, such as the name of this one.
        """
        return f".partial-{self._token}"

    @property
    def _token(self) -> str:
        return f"{self.save_id}-{self.replaces}-{self.system}-{self.pid}-{self.started}-{self.host}"

    def standing(self) -> Standing:
        """Return whether it is still writing, as far as this process can know.

        ``"gone"`` and ``"lives"`` are certain. ``"unknown"`` is returned for another host, another boot of this one,
        and a container with another PID namespace.
        """
        this_process = new_writer(self.save_id)
        if (self.system, self.host) != (this_process.system, this_process.host):
            return "unknown"
        if self.pid == this_process.pid:
            return "lives" if self.started == this_process.started and self.save_id in _running_saves else "gone"
        if not sys.platform.startswith("linux"):
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:
            pass  # another user's process
        try:
            started, has_ended = _read_process(self.pid)
        except OSError:
            return "unknown"
        return "gone" if has_ended or started != self.started else "lives"


def new_writer(save_id: str, replaces: str | None = None) -> Writer:
    """Return this process as the writer of a save."""
    try:
        started = _read_process(os.getpid())[0]
        system = _system_id()
    except OSError:
        started = 0
        system = _fallback_system
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return Writer(
        save_id=save_id, replaces=replaces or _NO_SAVE, system=system, pid=os.getpid(), started=started, host=host
    )


def writer_of(name: str) -> Writer | None:
    """Return the writer that is encoded in the name of a file or folder, if there is one."""
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    save_id, replaces, system, pid, started, host = match["token"].split("-", 5)
    return Writer(save_id=save_id, replaces=replaces, system=system, pid=int(pid), started=int(started), host=host)


def writers_by_name(names: Iterable[str]) -> dict[str, Writer]:
    """Return the writers that are encoded in names of files, by the name; other names are left out."""
    writers: dict[str, Writer] = {}
    for name in names:
        writer = writer_of(name)
        if writer is not None:
            writers[name] = writer
    return writers


def writers_in(names: Iterable[str], named: Writer | None) -> list[Writer]:
    """Return the writers of a folder that is not committed.

    Args:
        names: The files in it, among which are marks.
        named: The writer in the folder's own name. In a scattered save that is rank 0, perhaps on another host, and the
            one that writes to this place has left its mark inside.
    """
    writers_inside = list(writers_by_name(names).values())
    if named is None:
        return writers_inside
    return [writer for writer in writers_inside if writer.save_id == named.save_id] or [named]


@contextmanager
def writing(writer: Writer) -> Iterator[None]:
    """Mark a save as running in this process for the block; afterwards, its writer counts as gone."""
    _running_saves.add(writer.save_id)
    try:
        yield
    finally:
        _running_saves.discard(writer.save_id)


def _system_id() -> str:
    """Return an id for this boot of the Linux kernel and this PID namespace: a container may have its own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot_id = stream.read().strip()
    return xxhash.xxh3_64_hexdigest(f"{boot_id} {os.readlink('/proc/self/ns/pid')}".encode())[:12]


def _read_process(pid: int) -> tuple[int, bool]:
    """Return the start time of a process, and whether it has ended but has not been waited for yet."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    has_ended = fields[0] in (b"Z", b"X") and len(os.listdir(f"/proc/{pid}/task")) == 1
    return int(fields[19]), has_ended
