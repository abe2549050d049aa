"""A question asked in a fresh interpreter: whatever happens there is an answer too."""

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
"""The line of stderr after which a child has no more to do but to end."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a question.

    Attributes:
        given: What the child answered; empty if it did not come to that.
        status: Its exit status, negative for a signal; ``None`` if it had to be stopped.
        said: What it wrote to stderr before its end.
        said_at_exit: And at its end.
        seconds: How long it ran.
    """

    given: dict[str, Any]
    status: int | None
    said: str
    said_at_exit: str
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
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return f"{how}; it wrote: {lines[-1][:300]}" if lines else how


def ask(module: str, *arguments: str, seconds: float) -> Answer:
    """Run a module of this package in a fresh interpreter.

    Args:
        module: Its name in :mod:`fsdp_core.doctor`.
        arguments: What its ``main`` is to know, after the file for :func:`answer_with`.
        seconds: How long it may take.
    """
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-doctor-", ignore_cleanup_errors=True) as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "stderr.txt")
        # -P: as for the command itself, what lies in the working directory is not imported. Files and not pipes, which
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
        said, _, said_at_exit = errors.read_text(encoding="utf-8", errors="replace").partition(f"{END}\n")
        try:
            given = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            given = {}
    return Answer(given=given, status=status, said=said, said_at_exit=said_at_exit, seconds=monotonic() - began)


def answer_with(file: str, given: dict[str, Any]) -> None:
    """Give an answer from a child. A later one takes the place of an earlier one."""
    unfinished = Path(f"{file}.unfinished")
    unfinished.write_text(json.dumps(given), encoding="utf-8")
    unfinished.replace(file)
