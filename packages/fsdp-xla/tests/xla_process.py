"""Runs a script of this folder on XLA's CPU devices: a process of its own for each, since XLA can be started once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def on_hardware() -> bool:
    """Whether ``nox -s hardware -- xla`` runs this, on a TPU."""
    return os.environ.get("FSDP_XLA_TESTS_ON") == "TPU"


def run_script(script: str, devices: int, folder: Path, *arguments: str, timeout: float = 280.0) -> dict[str, Any]:
    """Run ``script`` and read what it has saved.

    Args:
        script: A file of this folder, which calls :func:`save_cases`.
        devices: How many CPU devices XLA has.
        folder: Where it may write.
        *arguments: Its further arguments.
        timeout: Seconds that it may take.

    Returns:
        The results of its cases by name; of one that raised, the traceback as a string that begins with "Traceback".
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("CPU_NUM_DEVICES", "PJRT_DEVICE")}
    # malloc is to give large tensors back when they are freed, or no peak could be measured
    environment |= {"PJRT_DEVICE": "TPU"} if on_hardware() else {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    folder.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [sys.executable, str(HERE / script), str(devices), str(folder), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    answer = folder / "results.pt"
    assert answer.exists(), f"{script} ended with {run.returncode}:\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    results: dict[str, Any] = torch.load(answer, weights_only=True)
    return results


def save_cases(cases: dict[str, Any], folder: Path) -> None:
    """Call each case, and save what they return; called by the script."""
    import traceback

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


def error(results: dict[str, Any], case: str) -> str:
    """What a case has raised."""
    result = results[case]
    assert isinstance(result, str), f"{case} raised nothing: {result}"
    assert result.startswith("Traceback"), result
    return result
