"""What all tests of the repository share: the choice of tests, and what they may cost."""

from __future__ import annotations

import gc
import os

pytest_plugins = ["tools.selection", "tools.costs"]

# Torch, which is imported after this, would wait for its threads by spinning: small tensors take many times the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # which tables of the command heed

# Until the tests are collected, their modules import torch and Lightning. Looking for garbage among what is imported
# takes a quarter of that time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
