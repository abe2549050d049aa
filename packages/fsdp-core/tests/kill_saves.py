"""Kills saves at random instants and looks at what is committed after each; a script.

Each save is a process forked from this one, which has torch imported already: that takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.checkpoint import read_manifest
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from versioned_saves import files_in, save_version, version_of

SECONDS = 20.0


def save_large(path: Path, version: float, runtime: Runtime) -> None:
    """Save so much that many saves are killed while they write."""
    save_version(path, version, runtime, shape=(64, 512))


def save_forever(path: Path, meeting: Path, rank: int, ranks: int, version: float, acknowledged: int | None) -> None:
    """Save one version after another, and write each to a pipe once it is saved; without one, each to a new path."""
    runtime = ProcessGroupRuntime()
    runtime.rank, runtime.world_size = rank, ranks
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    while True:
        save_large(path / f"step={version}.ckpt" if acknowledged is None else path, version, runtime)
        if rank == 0 and acknowledged is not None:
            os.write(acknowledged, f"{version}\n".encode())
        version += 1


def fork_rank(work: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a process of its own; gives its id."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the rank that is left complains of its dead peer
            work(*arguments)
        finally:
            os._exit(1)
    return pid


def wait_for(pid: int) -> None:
    """Wait until a process has ended."""
    end = time.monotonic() + SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError("a rank did not end after its peer was killed")
        time.sleep(0.001)


def kill_some(pids: list[int], choice: random.Random) -> None:
    """Kill at least one of these processes, and wait until all have ended."""
    for pid in choice.sample(pids, k=choice.randint(1, len(pids))):
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for(pid)


def kill_once(path: Path, meeting: Path, ranks: int, version: float, choice: random.Random, pace: float) -> float:
    """Start saving after ``version``, kill at a random instant; gives the version acknowledged last."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    pids = [fork_rank(save_forever, path, meeting, rank, ranks, version + 1, writer) for rank in range(ranks)]
    os.close(writer)
    acknowledged, end = b"", time.monotonic() + SECONDS
    while not acknowledged and time.monotonic() < end:  # until it has saved once, so that the instant is one of a save
        time.sleep(0.001)
        acknowledged += _read(reader)
    time.sleep(choice.uniform(0, 2 * pace))
    kill_some(pids, choice)
    acknowledged += _read(reader)
    os.close(reader)
    meeting.unlink(missing_ok=True)
    return max([version, *map(float, acknowledged.split())])


def kill_first_save(folder: Path, number: int, ranks: int, choice: random.Random, pace: float) -> None:
    """Kill, at a random instant, a run that saves under a new name each time; what a search finds then is whole."""
    meeting, before = folder.parent / f"meeting-first-{number}", set(folder.iterdir())
    pids = [fork_rank(save_forever, folder, meeting, rank, ranks, float(1000 * number), None) for rank in range(ranks)]
    end = time.monotonic() + SECONDS
    while set(folder.iterdir()) <= before and time.monotonic() < end:  # until the ranks have met, and one writes
        time.sleep(0.0005)
    time.sleep(choice.uniform(0, 2 * pace))
    kill_some(pids, choice)
    meeting.unlink(missing_ok=True)
    for found in (found for found in folder.iterdir() if not found.name.startswith(".")):
        assert found.suffix == ".ckpt", f"{found} is no name of a checkpoint"
        version_of(found)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 2**16)
    except BlockingIOError:
        return b""


def main(folder: Path, seed: int, kills: int, ranks: int) -> None:
    """Kill so many saves, one after another over the same checkpoint; print what was seen."""
    torch.set_num_threads(1)
    choice, path, alone = random.Random(seed), folder / "last.ckpt", ProcessGroupRuntime()
    began = time.monotonic()
    for version in (1.0, 2.0, 3.0):
        save_large(path, version, alone)
    pace = (time.monotonic() - began) / 3
    version, ahead, interrupted = 3.0, 0, 0
    for number in range(kills):
        acknowledged = kill_once(path, folder / f"meeting-{number}", ranks, version, choice, pace)
        committed = version_of(path)
        assert acknowledged <= committed <= acknowledged + 1, f"{acknowledged} was saved, and {committed} is there"
        ahead += committed > acknowledged
        interrupted += files_in(path) != {*read_manifest(path).files, "manifest.json"}
        version = committed
    save_large(path, version + 1, alone)
    assert version_of(path) == version + 1
    first, halves = folder / "first", 0
    first.mkdir()
    for number in range(1, 1 + kills // 5):
        before = set(first.glob(".*"))
        kill_first_save(first, number, ranks, choice, pace)
        halves += len(set(first.glob(".*")) - before)
    save_large(first / "last.ckpt", 1.0, alone)
    hidden = sorted(found.name for found in first.glob(".*"))
    left = files_in(path) - {*read_manifest(path).files, "manifest.json"}
    beside = sorted(found.name for found in folder.iterdir())
    print(json.dumps({"versions": version, "ahead": ahead, "interrupted": interrupted, "left": sorted(left),
                      "beside": beside, "halves": halves, "hidden": hidden}))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
