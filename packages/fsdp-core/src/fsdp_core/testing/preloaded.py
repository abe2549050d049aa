"""Imports torch, Lightning and the suite in the process that ranks are forked from.

Modules that can't be imported are left to the ranks that need them, which raise the usual error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path

__all__ = ["FAILURES", "THREADS"]

#: The names in ``fsdp_preload`` that can't be imported, with the error.
FAILURES: dict[str, str] = {}

# Modules that are imported are kept. Looking for garbage among them takes a quarter of the time of importing them.
gc.disable()

for _name in os.environ.get("FSDP_TESTS_PRELOAD", "").split():
    try:
        importlib.import_module(_name)
    except (Exception, SystemExit) as _error:
        FAILURES[_name] = f"{type(_error).__name__}: {_error}"

for _name in ("torch", "lightning.pytorch", "lightning.fabric", "fsdp_core.testing.suite.whole"):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

#: The names of the threads that importing has started, which a process forked from this one lacks.
THREADS = sorted(
    task.joinpath("comm").read_text().strip()
    for task in Path("/proc/self/task").glob("[0-9]*")
    if task.name != str(os.getpid())
)

# No rank needs to collect what modules hold: with torch and Lightning it takes 0.2 s to look at it.
gc.collect()
gc.freeze()
gc.enable()

if __name__ == "__main__":
    print("threads:", ", ".join(THREADS) or "none")
