"""Runs a script of this folder on XLA's devices: a process of its own for each, since XLA can be started once."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_core.testing.forking import start_script
from fsdp_xla.testing.ranks import QUICK

HERE = Path(__file__).parent


def on_hardware() -> bool:
    """Whether ``nox -s hardware -- xla`` runs this, on a TPU."""
    return os.environ.get("FSDP_XLA_TESTS_ON") == "TPU"


@dataclass(frozen=True, kw_only=True)
class Running:
    """A script that runs.

    Attributes:
        script: Its file in this folder.
        output: Where its output goes.
        answer: Where it writes its results.
        wait: Waits at most so many seconds for its exit status, which is ``None`` as long as there is none.
        kill: Ends it.
    """

    script: str
    output: Path
    answer: Path
    wait: Callable[[float], int | None]
    kill: Callable[[], None]

    def finish(self, seconds: float = 280.0, *, weights_only: bool = False) -> Any:
        """Wait for it to end well, and read its results."""
        status = self.wait(seconds)
        if status is None:
            self.kill()
        told = f"{self.script} ended with {status}" if status is not None else f"{self.script} took over {seconds:g} s"
        ended_well = status == 0 and self.answer.exists()
        assert ended_well, f"{told}:\n{self.output.read_text(errors='replace')[-12000:]}"
        return torch.load(self.answer, weights_only=weights_only)


def cpu_variables(devices: int | None) -> dict[str, str]:
    """What a process is told that is to run on the CPU; ``None`` leaves open how many devices there are."""
    told = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    return told if devices is None else {**told, "CPU_NUM_DEVICES": str(devices)}


def start(script: str, answer: Path, *arguments: str, devices: int | None = 4) -> Running:
    """Begin to run a script that is given the path of its results, and further arguments.

    Args:
        script: Its file in this folder.
        answer: Where it writes its results; it runs in that folder.
        *arguments: Further arguments.
        devices: How many devices XLA has on the CPU; ``None`` leaves it open.
    """
    return _start(script, answer, str(answer), *arguments, devices=devices)


def _start(script: str, answer: Path, *arguments: str, devices: int | None) -> Running:
    environment = {name: value for name, value in os.environ.items() if name not in ("CPU_NUM_DEVICES", "PJRT_DEVICE")}
    on_tpu = {"PJRT_DEVICE": "TPU", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    environment |= on_tpu if on_hardware() else cpu_variables(devices)
    answer.parent.mkdir(parents=True, exist_ok=True)
    output = answer.with_suffix(".output")
    if not on_hardware():
        forked = start_script(HERE / script, *arguments, folder=answer.parent, output=output, environment=environment)

        def wait_for_fork(seconds: float) -> int | None:
            forked.join(seconds)
            return forked.exitcode

        return Running(script=script, output=output, answer=answer, wait=wait_for_fork, kill=forked.kill)
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / script), *arguments],
            cwd=answer.parent,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )

    def wait_for_process(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return Running(script=script, output=output, answer=answer, wait=wait_for_process, kill=process.kill)


def results_of(script: str, answer: Path, *arguments: str, devices: int | None = 4) -> Any:
    """Run a script, given the path of its results and ``arguments``, and read them."""
    return start(script, answer, *arguments, devices=devices).finish()


def run_script(script: str, devices: int, folder: Path, *arguments: str, timeout: float = 280.0) -> dict[str, Any]:
    """Run a script that calls :func:`save_cases`, and read what it has saved.

    Args:
        script: Its file in this folder.
        devices: How many CPU devices XLA has.
        folder: Where it may write.
        *arguments: Its further arguments.
        timeout: Seconds that it may take.

    Returns:
        The results of its cases by name; of one that raised, the traceback as a string that begins with "Traceback".
    """
    words = (str(devices), str(folder), *arguments)
    running = _start(script, folder / "results.pt", *words, devices=devices)
    results: dict[str, Any] = running.finish(timeout, weights_only=True)
    return results


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


def error(results: dict[str, Any], case: str) -> str:
    """What a case has raised."""
    result = results[case]
    assert isinstance(result, str), f"{case} raised nothing: {result}"
    assert result.startswith("Traceback"), result
    return result
