"""Who writes an unfinished save: how its files tell it, and whether that process is provably gone."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import xxhash

__all__ = ["MARK", "Standing", "Writer", "new_writer", "writer_of", "writing"]

Standing = Literal["gone", "lives", "unknown"]
"""What can be known of a save's writer from here."""

_TOKEN = r"[0-9a-f]{12}-[0-9a-f]{12}-[0-9a-f]{12}-[1-9]\d{0,8}-\d{1,20}-[A-Za-z0-9.-]{0,64}"
MARK = rf"\.writer-{_TOKEN}"
"""The names of the files, a regular expression, that lie in a checkpoint while a save overwrites it."""

_NAMED = re.compile(rf"\.(?:writer|partial)-(?P<token>{_TOKEN})")
_NOBODY = "0" * 12

#: The saves and removals that go on in this process.
_active: set[str] = set()

#: Where the system does not tell one start of it from another, nobody but this process knows of it.
_of_this_process = secrets.token_hex(6)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Who makes a save. All of it stands in a name, which is there at one instant, so no half of it is ever read.

    Attributes:
        save_id: The save's id.
        replaces: The id of the save that it is to replace; zeros where it replaces none.
        system: What stands for one start of one machine's system, and for the processes that see each other there.
        pid: The process's number there.
        started: When it was started, as the system counts, for numbers are given again.
        host: The host's name, for people.
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
        """The name of the empty file that tells it in the folder that is written to."""
        return f".writer-{self._token}"

    @property
    def partial(self) -> str:
        """The name of the folder that is written to beside the path.

        It does not hold the checkpoint's own name, nor anything else that a search for checkpoints goes by.
        """
        return f".partial-{self._token}"

    @property
    def _token(self) -> str:
        return f"{self.save_id}-{self.replaces}-{self.system}-{self.pid}-{self.started}-{self.host}"

    def standing(self) -> Standing:
        """Whether it still writes, as far as that can be known from here.

        ``"gone"`` and ``"lives"`` are certain. Of another host, of another start of this one, and of a container that
        does not see this one's processes nothing is known.
        """
        here = new_writer(self.save_id)
        if (self.system, self.host) != (here.system, here.host):
            return "unknown"
        if self.pid == here.pid:
            return "lives" if self.started == here.started and self.save_id in _active else "gone"
        if not sys.platform.startswith("linux"):
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:
            pass  # it is another user's
        try:
            started, ended = _process(self.pid)
        except OSError:
            return "unknown"
        return "gone" if ended or started != self.started else "lives"


def new_writer(save_id: str, replaces: str | None = None) -> Writer:
    """This process as the writer of a save."""
    try:
        started, system = _process(os.getpid())[0], _system()
    except OSError:
        started, system = 0, _of_this_process
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return Writer(
        save_id=save_id, replaces=replaces or _NOBODY, system=system, pid=os.getpid(), started=started, host=host
    )


def writer_of(name: str) -> Writer | None:
    """The writer that a file or a folder is named for, if it is named for one."""
    found = _NAMED.fullmatch(name)
    if found is None:
        return None
    save_id, replaces, system, pid, started, host = found["token"].split("-", 5)
    return Writer(save_id=save_id, replaces=replaces, system=system, pid=int(pid), started=int(started), host=host)


@contextmanager
def writing(writer: Writer) -> Iterator[None]:
    """A block in which this process makes a save; when it has ended, however it has, the writer is gone."""
    _active.add(writer.save_id)
    try:
        yield
    finally:
        _active.discard(writer.save_id)


def _system() -> str:
    """One start of a Linux kernel, and the processes that see each other in it: a container may have its own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        start = stream.read().strip()
    return xxhash.xxh3_64_hexdigest(f"{start} {os.readlink('/proc/self/ns/pid')}".encode())[:12]


def _process(pid: int) -> tuple[int, bool]:
    """When a process was started, and whether it has ended and nobody has asked for its exit status yet."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    ended = fields[0] in (b"Z", b"X") and len(os.listdir(f"/proc/{pid}/task")) == 1
    return int(fields[19]), ended
