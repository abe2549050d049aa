"""Runs a script of this folder on XLA's devices, in a process of its own: on the CPU, and on a TPU's chips.

Ranks on a TPU are processes, which a program launches; the other tests call functions in a pool of :mod:`launching`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from fsdp_core.testing.launching.forking import start_script
from fsdp_xla.testing.ranks import COMPUTED_ONCE, QUICK

HERE = Path(__file__).parent


def on_hardware() -> bool:
    """Whether ``nox -s hardware -- xla`` runs this, on a TPU."""
    return os.environ.get("FSDP_XLA_TESTS_ON") == "TPU"


def cpu_variables(devices: int) -> dict[str, str]:
    """The environment variables of a process that is to run on so many devices of the CPU."""
    told = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    return {**told, **COMPUTED_ONCE, "CPU_NUM_DEVICES": str(devices)}


def run_script(script: str, devices: int, folder: Path, *arguments: str, timeout: float = 280.0) -> dict[str, Any]:
    """Run a script that calls :func:`save_cases`, and read what it has saved.

    Args:
        script: Its file in this folder.
        devices: How many CPU devices XLA has.
        folder: Where it may write; it runs there.
        *arguments: Its further arguments.
        timeout: Seconds that it may take.

    Returns:
        The results of its cases by name; of one that raised, the traceback as a string that begins with "Traceback".
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("CPU_NUM_DEVICES", "PJRT_DEVICE")}
    on_tpu = {"PJRT_DEVICE": "TPU", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    environment |= on_tpu if on_hardware() else cpu_variables(devices)
    words = (str(devices), str(folder), *arguments)
    output, answer = folder / "results.output", folder / "results.pt"
    status = (_run if on_hardware() else _fork)(script, words, folder, output, environment, timeout)
    told = f"{script} ended with {status}" if status is not None else f"{script} took over {timeout:g} s"
    ended_well = status == 0 and answer.exists()
    assert ended_well, f"{told}:\n{output.read_text(errors='replace')[-12000:]}"
    results: dict[str, Any] = torch.load(answer, weights_only=True)
    return results


def _fork(
    script: str, words: tuple[str, ...], folder: Path, output: Path, environment: dict[str, str], timeout: float
) -> int | None:
    forked = start_script(HERE / script, *words, folder=folder, output=output, environment=environment)
    forked.join(timeout)
    status: int | None = forked.exitcode
    if status is None:
        forked.kill()
    return status


def _run(
    script: str, words: tuple[str, ...], folder: Path, output: Path, environment: dict[str, str], timeout: float
) -> int | None:
    command = [sys.executable, "-W", "ignore", str(HERE / script), *words]
    with output.open("wb") as stream:
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return None
    return ended.returncode


def save_cases(cases: dict[str, Any], folder: Path) -> None:
    """Call each case, and save what they return; called by the script."""
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = case()
        except BaseException:
            results[name] = traceback.format_exc()
        torch.save(results, folder / "results.tmp")
    (folder / "results.tmp").replace(folder / "results.pt")


def ok(results: dict[str, Any], case: str) -> Any:
    """What a case has returned."""
    result = results[case]
    assert not (isinstance(result, str) and result.startswith("Traceback")), result
    return result
