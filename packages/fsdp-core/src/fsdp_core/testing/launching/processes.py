"""Runs scripts as users start them: in real processes, each with a time limit, leaving none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fsdp_core.testing.launching.forking import scaled_limit

__all__ = ["TIME_LIMIT", "FinishedScript", "fresh_environment", "interruptible", "start"]

TIME_LIMIT = 120  # per script, which takes about ten
_TOKEN_VARIABLE = "FSDP_TESTS_STARTED_THIS"
#: The variables that launchers set for ranks. Some are left in the tests' own process, if that has trained.
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "TORCHELASTIC_RUN_ID", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
)


@dataclass(frozen=True, kw_only=True)
class FinishedScript:
    """The result of a script that has ended.

    Attributes:
        status: The exit status; negative for a signal.
        output: The output of all of its processes.
        seconds: How long it took.
    """

    status: int
    output: str
    seconds: float

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        """The lines of JSON that its processes wrote."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def reports(self, front_end: str) -> list[dict[str, Any]]:
        """The final report of each rank, by rank."""
        return sorted(
            (report for report in self.json_lines if report.get("front_end") == front_end),
            key=lambda report: int(report["rank"]),
        )


def fresh_environment() -> dict[str, str]:
    """Return this process's environment variables, without those that a script would take for its launcher's."""
    return {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}


def _find_started(token: str) -> list[psutil.Process]:
    """The processes of a script that are still running."""
    running = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_TOKEN_VARIABLE) == token and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except psutil.Error:
            continue
    return running


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which started processes can be interrupted, also if this one is a shell's background job.

    A background job ignores SIGINT, and so do processes that it starts, unless it has a handler at that moment.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def start(
    tmp: Path,
    *command: str,
    folder: Path | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes], Path], None] | None = None,
    **environ: str,
) -> FinishedScript:
    """Run Python with a command line, and check that it leaves no process behind.

    Args:
        tmp: The folder for its output file; a pipe would stay open as long as a process that is left behind.
        *command: The arguments of ``python``.
        folder: Where it runs, if not in ``tmp``.
        meanwhile: Called with the process and its output file while it runs.
        **environ: Environment variables.
    """
    token = uuid.uuid4().hex
    start_time = time.monotonic()
    file = tmp / f"{token}.txt"
    with file.open("wb") as out, interruptible():
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder or tmp,
            env={
                **fresh_environment(),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                _TOKEN_VARIABLE: token,
                **environ,
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if meanwhile is not None:
            meanwhile(process, file)
        status = process.wait(timeout=scaled_limit(TIME_LIMIT))
        seconds = time.monotonic() - start_time
        # A rank may end a moment after the process that started it.
        _, survivors = psutil.wait_procs(_find_started(token), timeout=10)
        assert not survivors, f"{survivors} were left behind:\n{file.read_text()}"
    except subprocess.TimeoutExpired:
        pytest.fail(f"{command} did not end within {scaled_limit(TIME_LIMIT):g} s:\n{file.read_text()}")
    finally:
        for remaining in _find_started(token):
            remaining.kill()
        process.wait()
    return FinishedScript(status=status, output=file.read_text(), seconds=seconds)
