"""Hosts for tests on one machine: each has a network, mounts and a name of its own, and a cable joins them.

They are Linux namespaces, which only root can make: without them a test is skipped, with the reason.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment

__all__ = ["TORCHRUN", "Host", "Run", "torchrun", "two_hosts"]

SECONDS = 240
TORCHRUN = Path(__file__).parent / "torchrun.py"
_ZONES = ("Pacific/Auckland", "America/New_York")


@dataclass(kw_only=True)
class Run:
    """A command that runs on a host.

    Attributes:
        process: The process.
        output: The file that it and its children write to.
    """

    process: BaseProcess
    output: Path

    @property
    def told(self) -> str:
        """What was written by now."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def ended(self, seconds: float = SECONDS) -> int:
        """Wait for the end, and return the exit status."""
        self.process.join(timeout=seconds)
        assert self.process.exitcode is not None, f"it has not ended within {seconds:g} s:\n{self.told[-6000:]}"
        return self.process.exitcode

    def until(self, words: str, times: int = 1, seconds: float = SECONDS) -> None:
        """Wait until the output holds these words so many times."""
        deadline = time.monotonic() + seconds
        while self.told.count(words) < times:
            assert time.monotonic() < deadline, f"{words!r} has not come {times} times:\n{self.told[-6000:]}"
            assert self.process.exitcode is None, f"it has ended before {words!r} came:\n{self.told[-6000:]}"
            time.sleep(0.05)


@dataclass(kw_only=True)
class Host:
    """One of the hosts.

    Attributes:
        name: Its name, which both hosts can look up.
        address: Its address on the cable.
        zone: Its time zone.
        holder: The process that keeps its namespaces.
        folder: Where outputs go.
    """

    name: str
    address: str
    zone: str
    holder: subprocess.Popen[bytes]
    folder: Path
    runs: list[Run] = field(default_factory=list)

    def inside(self, *command: str) -> list[str]:
        """The words of a command that runs on this host."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts", "--", *command]

    def do(self, *command: str) -> str:
        """Run a command to its end."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def has_own_disk_at(self, path: Path) -> None:
        """Put an empty file system there, that no other host sees."""
        path.mkdir(parents=True, exist_ok=True)
        self.do("mount", "-t", "tmpfs", "none", str(path))

    def start(
        self, path: Path, *words: str, folder: Path, ranks: int = 1, environment: Mapping[str, str] | None = None
    ) -> Run:
        """Start a script, or torchrun, which is to start so many ranks in all."""
        output = self.folder / f"{self.name}-{len(self.runs)}.txt"
        output.touch()
        variables = {**fresh_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TZ": self.zone}
        process = start_script(
            path,
            *words,
            folder=folder,
            output=output,
            environment={**variables, **(environment or {})},
            ranks=ranks + (path == TORCHRUN),
            prelude=partial(_enter, self.holder.pid),
        )
        run = Run(process=process, output=output)
        self.runs.append(run)
        return run

    def processes(self) -> list[int]:
        """The processes on this host, without the one that keeps it."""
        own, others = _network_of(self.holder.pid), map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in others if pid != self.holder.pid and _network_of(pid) == own]

    def lose(self) -> None:
        """End all that runs there at once, as a loss of power does."""
        while own := self.processes():
            for pid in own:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            own = [pid for pid in own if _state_of(pid) not in (None, "Z", "X")]
            if not own:
                break
            time.sleep(0.02)


def _enter(pid: int) -> None:
    """Let this process, which is on no host yet, go to the host that another one keeps."""
    libc = ctypes.CDLL(None, use_errno=True)
    own_mounts = 0x200  # CLONE_FS: threads share them otherwise, and can't go elsewhere
    if libc.unshare(own_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    for kind in ("net", "mnt", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")
    time.tzset()


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended, or is a zombie
        return None


def _state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that share all disks, and end with the block."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or missing:
        pytest.skip(f"hosts are namespaces of Linux, made with util-linux and iproute2; there is no {missing}")
    names = ("host-a", "host-b")
    table, nobody = folder / "etc-hosts", folder / "etc-resolv.conf"
    nobody.write_text("options timeout:1 attempts:1\n")  # a name server that can't be reached is waited for
    addresses = [f"10.213.0.{number + 1}" for number in range(2)]
    table.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n::ffff:{a} {n}\n" for a, n in zip(addresses, names, strict=True))
    )
    holders: list[subprocess.Popen[bytes]] = []
    hosts: list[Host] = []
    try:
        for name, address, zone in zip(names, addresses, _ZONES, strict=True):
            mounts = f"mount --bind {table} /etc/hosts && mount --bind {nobody} /etc/resolv.conf"
            script = f"hostname {name} && {mounts} && ip link set lo up && echo ready && exec cat"
            holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "--propagation=private", "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            holders.append(holder)
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != b"ready\n":
                pytest.skip(f"no hosts can be made here: {holder.stderr.read().decode().strip()}")
            hosts.append(Host(name=name, address=address, zone=zone, holder=holder, folder=folder))
        first, second = (str(one.holder.pid) for one in hosts)
        cable = ["ip", "link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second]
        joined = subprocess.run(cable, capture_output=True, text=True)
        if joined.returncode:
            pytest.skip(f"no hosts can be joined here: {joined.stderr.strip()}")
        for host in hosts:
            host.do("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.do("ip", "link", "set", "cable", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.lose()
        for holder in holders:
            holder.kill()
            holder.wait()


def torchrun(first: Host, *words: str, ranks: int) -> list[str]:
    """What follows ``torchrun`` on each host, whose first one has the meeting point."""
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={first.name}:29400", "--rdzv-id=run")
    return ["--nnodes=2", f"--nproc-per-node={ranks}", *meeting, *words]
