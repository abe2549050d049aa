"""What a user pays before anything trains: the ``fsdp`` command, and what ``import torch`` costs more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["fsdp_list", "import_torch"]

# What torch does for an entry point of the group `torch.backends`, at the end of `import torch`.
LOAD_AND_CALL = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
import importlib.metadata, sys, time
def seconds(action):
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result
scan, points = seconds(lambda: importlib.metadata.entry_points(group="torch.backends"))
ours = next(point for point in points if point.name == "fsdp_core")
before = set(sys.modules)
took, _ = seconds(lambda: ours.load()())
print(took, scan, *sorted(set(sys.modules) - before))
"""

LISTED_WITHOUT_TORCH = """
import sys
sys.argv = ["fsdp", "list"]
from fsdp_core.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
found = sorted({"torch", "lightning", "lightning_fabric", "pytorch_lightning", "torch_xla"} & set(sys.modules))
print("imported:", *found)
"""


def run(*command: str) -> tuple[float, str]:
    """Run a command; return its wall time in seconds and what it printed.

    Modules are compiled once and kept, as pip does for an installed package, whatever this process was told.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    return seconds, done.stdout


def fsdp_list(runs: int) -> dict[str, Any]:
    """Time ``fsdp list`` as a shell sees it, in turns with an interpreter that does nothing.

    Args:
        runs: How often; the first run of each, which fills the file cache, is not counted.

    Returns:
        Medians and the greatest, in seconds, and the heavy libraries that listing imported.
    """
    command = str(Path(sys.executable).with_name("fsdp"))
    listing, nothing = [], []
    for _ in range(runs + 1):
        listing.append(run(command, "list")[0])
        nothing.append(run(sys.executable, "-c", "pass")[0])
    imported = run(sys.executable, "-c", LISTED_WITHOUT_TORCH)[1].splitlines()[-1].removeprefix("imported:").split()
    return {
        "runs": runs,
        "seconds": median(listing[1:]),
        "seconds at most": max(listing[1:]),
        "seconds for python -c pass": median(nothing[1:]),
        "heavy imports": imported,
    }


def import_torch(runs: int) -> dict[str, Any]:
    """Time what torch does for our entry point when it is imported: import the module, call the function.

    A whole ``import torch`` varies by tens of milliseconds from run to run, so that two of them can't be compared to
    one. In each of ``runs`` fresh interpreters torch is imported with its backend autoload off, then the entry
    point is loaded and called under a clock. Looking up which entry points there are is torch's own work, which it
    does with or without us; it is timed apart.

    Returns:
        Medians and the greatest, in seconds, and the modules that loading imported.
    """
    ours, lookup, imported = [], [], set[str]()
    for _ in range(runs + 1):
        took, scan, *modules = run(sys.executable, "-c", LOAD_AND_CALL)[1].split()
        ours.append(float(took))
        lookup.append(float(scan))
        imported |= set(modules)
    return {
        "runs": runs,
        "seconds": median(ours[1:]),
        "seconds at most": max(ours[1:]),
        "seconds of torch's own lookup": median(lookup[1:]),
        "modules": sorted(imported),
    }
