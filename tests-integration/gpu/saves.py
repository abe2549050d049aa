"""Part 6: what saves cost: how long one holds a training, and how long saves and loads take beside torch's own.

Saves of 4 GB are timed by ``checkpoint_time.py`` of the benchmarks.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from card import HAS_CARD, arguments
from records import Records

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from checkpoint_time import DCP_STALL, FOUR_GIGABYTES, SMALL, held, save_and_load
from device import PROCESS_GROUP

from fsdp_core.torch_private.dtensors import note_meshes

STRATEGIES = ("fsdp2", "fsdp_native")
#: Bytes that the folder of large checkpoints must have free: four of 4 GB, and the one that a save replaces.
FREE_BYTES = 24 * 2**30


def roomy_folder(out: Path) -> Path:
    """Where large checkpoints are saved: in memory if there is room, where no disk hides what a save costs itself.

    run.py names a folder there, which it removes even if this process is killed.
    """
    memory = Path(os.environ.get("FSDP_GPU_MEMORY_FOLDER", "/dev/shm"))
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > FREE_BYTES
    # what is in this folder counts as memory, and ranks copy the state twice more
    return memory if roomy and psutil.virtual_memory().available > 2 * FREE_BYTES else out


def measure_costs(strategy: str, records: Records, out: Path, deadline: float, *, tiny: bool) -> None:
    """Time saves and loads beside torch's own, and how long a save holds a Trainer.

    Args:
        strategy: The strategy's name.
        records: Where figures are recorded.
        out: The folder of the run.
        deadline: When measuring must have ended, on the clock of :func:`time.monotonic`.
        tiny: Whether checkpoints have a few megabytes.
    """
    size = SMALL if tiny else FOUR_GIGABYTES
    timings: dict[str, Callable[[Path], dict[str, Any]]] = {
        "how long saves hold a Trainer": lambda folder: held(strategy, size, folder, 1),
        "saves and loads beside torch's own": lambda folder: save_and_load(
            strategy, size, folder, 1 if tiny else 2, dcp_stall=True, deadline=deadline
        ),
    }
    for timing, measure in timings.items():
        name = f"{strategy}: {timing}, timed"
        if deadline - time.monotonic() < (2 if tiny else 15):  # what it takes at least
            records.no_time(name)
            continue
        with records.check(name) as details:
            with tempfile.TemporaryDirectory(prefix="timed-", dir=roomy_folder(out)) as folder:
                result = measure(Path(folder))
            details |= {"folder": folder, "seconds by what was done": result["seconds"]}
            details["turns, 0 if only the first time was timed"] = result.get("turns", 1)
            record_figures(strategy, result, records, folder)
        if "error" in details:
            start_group()
        gc.collect()
        if HAS_CARD:
            torch.cuda.empty_cache()


def record_figures(strategy: str, result: dict[str, Any], records: Records, folder: str) -> None:
    """Record the figures of one run of ``checkpoint_time.py`` that have a bar, or none yet.

    Args:
        strategy: The strategy's name.
        result: What it has written.
        records: Where figures are recorded.
        folder: Where checkpoints were saved.
    """
    figures = {
        "training held by an async save ÷ save": ("training thread held by an async save of 4 GB ÷ a save", 0.05),
        "save ÷ save by torch DCP": ("save ÷ DCP's", 0.8),
        "load ÷ load by torch DCP": ("load ÷ DCP's", 0.8),
        f"stall of an async save ÷ {DCP_STALL}": ("stall of an async save ÷ stall of DCP's async save", None),
    }
    for pair, (name, bar) in figures.items():
        if pair in result["ratios"]:
            ratio = result["ratios"][pair]
            medians = {key: result["medians"][key] for key in pair.split(" ÷ ")}
            at_most = {} if bar is None else {"at_most": bar}
            details = {"from": ratio["from"], "to": ratio["to"], "medians": medians, "folder": folder}
            records.figure(f"{name}, {strategy}", ratio["ratio"], **at_most, **details)


def start_group() -> None:
    """Let this process be the only rank, as the benchmarks expect.

    A rank in a process of its own would take as long to start as a save of 4 GB takes several times. A group that
    something has failed in is left for a new one.
    """
    if dist.is_initialized():
        note_meshes()  # torch names groups anew after this, and equal names would be taken for the old groups
        dist.destroy_process_group()
    os.environ.setdefault("LOCAL_RANK", "0")  # by which a benchmark finds its device
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    dist.init_process_group(PROCESS_GROUP, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def main() -> None:
    """Run the part."""
    words, records = arguments("saves", __doc__)
    start_group()
    for strategy in STRATEGIES:
        measure_costs(strategy, records, words.out, words.deadline, tiny=words.tiny)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
