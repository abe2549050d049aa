"""Part 1: what the run is on: driver, clocks, torch, NCCL, and what `fsdp doctor` and `fsdp list` say of it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

import torch
from card import HAS_CARD, arguments
from records import Records

#: What is asked of nvidia-smi; clocks in MHz, power in watts, memory in MiB.
DRIVER_FACTS = (
    *("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("power.limit", "temperature.gpu", "pstate", "ecc.mode.current", "mig.mode.current"),
)

#: Seconds that `fsdp doctor` may take: it starts several processes, and each imports torch or Lightning.
DOCTOR_SECONDS = 45.0


def run_command(*words: str) -> str:
    """Run a command and return what it prints, which also goes to the log."""
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    print(f"$ {' '.join(words)}\n{run.stdout}{run.stderr}", flush=True)
    assert run.returncode == 0, f"{words[-1]!r} ended with status {run.returncode}: {run.stderr.strip()[-300:]}"
    return run.stdout


def driver_facts() -> list[dict[str, str]]:
    """What the driver says of each card; nothing is changed."""
    query = f"--query-gpu={','.join(DRIVER_FACTS)}"
    lines = run_command("nvidia-smi", query, "--format=csv,noheader,nounits").strip().splitlines()
    return [dict(zip(DRIVER_FACTS, map(str.strip, line.split(",")), strict=True)) for line in lines]


def torch_facts() -> dict[str, Any]:
    """The versions of torch and of what it calls, and the first card as torch sees it."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if not HAS_CARD:
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
        "card": properties.name,
        "memory in GiB": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "compute capability": f"{properties.major}.{properties.minor}",
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def check_command_line(records: Records, deadline: float) -> None:
    """Check that the strategies are listed as available, and that the doctor finds nothing wrong.

    Args:
        records: Where it is recorded.
        deadline: When the doctor must have ended, on the clock of :func:`time.monotonic`.
    """
    command = (sys.executable, "-m", "fsdp_core")
    with records.check("fsdp list") as details:
        run_command(*command, "list")
        rows = json.loads(run_command(*command, "list", "--json"))["strategies"]
        details["strategies"] = {row["name"]: row["runs_here"] or row["reason"] for row in rows}
        for name in ("fsdp2", "fsdp_native"):
            assert details["strategies"].get(name) is True, f"{name} can't run here: {details['strategies'].get(name)}"
    if deadline - time.monotonic() < DOCTOR_SECONDS:
        records.no_time("fsdp doctor", f"it may take {DOCTOR_SECONDS:.0f} s")
        return
    with records.check("fsdp doctor") as details:
        details["report"] = run_command(*command, "doctor")


def main() -> None:
    """Run the part."""
    words, records = arguments("facts", __doc__)
    with records.check("torch") as details:
        details |= torch_facts()
    if HAS_CARD and shutil.which("nvidia-smi"):
        with records.check("driver") as details:
            details["cards"] = driver_facts()
    else:
        reason = "there is no nvidia-smi" if HAS_CARD else "there is no card: this is a rehearsal on the CPU"
        records.outcome("driver", "left out", reason=reason)
    check_command_line(records, words.deadline)


if __name__ == "__main__":
    main()
