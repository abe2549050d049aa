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

# Imported modules stay alive. Looking for garbage among them takes a quarter of the import time.
gc.disable()

for _name in os.environ.get("FSDP_TESTS_PRELOAD", "").split():
    try:
        importlib.import_module(_name)
    except (Exception, SystemExit) as _error:
        FAILURES[_name] = f"{type(_error).__name__}: {_error}"

for _name in ("torch", "lightning.pytorch", "lightning.fabric", "fsdp_core.testing.suite.strategy_suite"):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

#: The names of the threads that the imports started, which a process forked from this one lacks.
THREADS = sorted(
    task.joinpath("comm").read_text().strip()
    for task in Path("/proc/self/task").glob("[0-9]*")
    if task.name != str(os.getpid())
)

# Ranks need not collect what modules hold: with torch and Lightning that takes 0.2 s per collection.
gc.collect()
gc.freeze()
gc.enable()

if __name__ == "__main__":
    print("threads:", ", ".join(THREADS) or "none", flush=True)
