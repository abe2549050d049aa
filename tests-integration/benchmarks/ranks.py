"""Run a script of this folder on several ranks, within a time limit, and be such a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from device import ACCELERATOR, PROCESS_GROUP, RANKS, prepare_thread

__all__ = ["be_a_rank", "run_on_ranks"]


def run_on_ranks(script: str, *arguments: object, time_limit: float, ranks: int = RANKS) -> dict[str, Any]:
    """Start ``script`` under ``torchrun`` and read what its rank 0 writes to ``--out``.

    Args:
        script: A file, relative to this folder.
        arguments: Further words of the command line.
        time_limit: Seconds after which all of them are ended.
        ranks: How many; by default one for each GPU of this machine, and two on a machine without. On the CPU each
            has one thread.

    Raises:
        RuntimeError: A rank failed, or the time was up.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = [*launcher, (Path(__file__).parent / script).resolve(), *arguments, "--out", out]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        if ACCELERATOR == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(list(map(str, words)), env=environment)
        try:
            status = process.wait(timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{script} took more than {time_limit:.0f} s") from None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its ranks, which a kill would leave behind
                process.wait()
        if status:
            raise RuntimeError(f"{script} ended with status {status}")
        return dict(json.loads(out.read_text()))


def be_a_rank(measure: Callable[[], dict[str, Any]], out: Path) -> None:
    """Measure on this rank and end the process; rank 0 writes what it found.

    Args:
        measure: Called on every rank, inside a process group.
        out: The file for rank 0's result.
    """
    prepare_thread()
    dist.init_process_group(PROCESS_GROUP)
    result = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    # Contenders leave models behind that keep gloo's threads alive, and these can abort an interpreter that shuts down.
    os._exit(0)
