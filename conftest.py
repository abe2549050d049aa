"""What all tests of the repository share: the choice of tests, and what they may cost."""

from __future__ import annotations

import atexit
import gc
import os
import sys

import pytest

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


_ended: list[int] = []  # with the exit status


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.pluginmanager.get_plugin("session")
    if session is not None:
        _ended.append(int(session.exitstatus))


@atexit.register
def _end() -> None:
    """End a process whose session has ended without freeing the modules of torch and Lightning: that takes 0.5 s."""
    if _ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ended[-1])
