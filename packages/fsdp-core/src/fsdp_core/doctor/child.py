"""Runs a check in a fresh interpreter, so that crashes and hangs are results too."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["END", "Answer", "answer_with", "ask"]

END = "fsdp doctor: what follows is written when the process ends"
"""The line on stderr after which a child only has to exit."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a child process.

    Attributes:
        data: The child's answer; empty if it gave none.
        status: Its exit status, negative for a signal; ``None`` if it had to be stopped.
        stderr_text: What it wrote to stderr before its end.
        stderr_at_exit: What it wrote to stderr at its end.
        seconds: How long it ran.
    """

    data: dict[str, Any]
    status: int | None
    stderr_text: str
    stderr_at_exit: str
    seconds: float

    @property
    def failure(self) -> str:
        """How the process ended, as a predicate, with the last line that it wrote."""
        if self.status is None:
            how = f"was stopped: it had not ended after {self.seconds:.0f} s"
        elif self.status < 0:
            how = f"was ended by signal {-self.status}"
        else:
            how = f"ended with status {self.status}"
        lines = [line.strip() for line in self.stderr_text.splitlines() if line.strip()]
        return f"{how}; it wrote: {lines[-1][:300]}" if lines else how


def ask(module: str, *arguments: str, seconds: float) -> Answer:
    """Run a module of this package in a fresh interpreter.

    Args:
        module: Its name in :mod:`fsdp_core.doctor`.
        arguments: The arguments of its ``main``, after the file for :func:`answer_with`.
        seconds: How long it may take.
    """
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-doctor-", ignore_cleanup_errors=True) as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "stderr.txt")
        # -P: as for the command itself, nothing is imported from the working directory. Files instead of pipes, which
        # a process that the child has left behind would keep open.
        command = [sys.executable, "-P", "-m", f"fsdp_core.doctor.{module}", str(answer), *arguments]
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = None
        stderr_text, _, stderr_at_exit = errors.read_text(encoding="utf-8", errors="replace").partition(f"{END}\n")
        try:
            data = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            data = {}
    return Answer(
        data=data, status=status, stderr_text=stderr_text, stderr_at_exit=stderr_at_exit, seconds=monotonic() - began
    )


def answer_with(file: str, data: dict[str, Any]) -> None:
    """Write a child's answer. A later answer replaces an earlier one."""
    unfinished = Path(f"{file}.unfinished")
    unfinished.write_text(json.dumps(data), encoding="utf-8")
    unfinished.replace(file)
