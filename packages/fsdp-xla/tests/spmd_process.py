"""Runs a script of this folder in a process of its own: SPMD can't be turned off again in the one that has it on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent

#: Compiles in a third of the time; what is compiled computes the same.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def start(script: str, out: Path, *args: str, devices: int | None = 4) -> subprocess.Popen[str]:
    """Begin to run a script, which gets the path of its results and ``args``.

    Args:
        script: Its file in this folder.
        out: Where it writes its results.
        *args: Further arguments.
        devices: How many devices XLA has; ``None`` leaves it open.
    """
    env = {**os.environ, "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": _QUICK}
    env.pop("CPU_NUM_DEVICES", None)
    if devices is not None:
        env["CPU_NUM_DEVICES"] = str(devices)
    command = [sys.executable, "-W", "ignore", str(HERE / script), str(out), *args]
    return subprocess.Popen(
        command, cwd=out.parent, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str], out: Path, seconds: float = 300) -> Any:
    """Wait for a script, and read its results."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"it took more than {seconds} s; its output was\n{output[-5000:]}") from None
    assert process.returncode == 0, f"it ended with {process.returncode}; its output was\n{output[-5000:]}"
    return torch.load(out, weights_only=False)


def results_of(script: str, out: Path, *args: str, devices: int | None = 4) -> Any:
    """Run a script and read its results."""
    return finish(start(script, out, *args, devices=devices), out)
