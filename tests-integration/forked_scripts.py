"""Scripts whose ranks are forked, for tests that are not about how users start them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil

from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment

__all__ = ["run_forked"]

SECONDS = 150


def run_forked(
    path: Path,
    *words: str,
    folder: Path,
    ranks: int = 2,
    status: int = 0,
    finds: str = "",
    imports: tuple[str, ...] = (),
) -> str:
    """Run a script to its end, and see that it leaves no process behind; what its ranks wrote.

    Args:
        path: The script.
        *words: What follows its name.
        folder: The working directory.
        ranks: How many it has.
        status: How it is to end.
        finds: Where it imports from besides.
        imports: The modules that its ranks share, for they take long to import.
    """
    output = folder / f"{uuid.uuid4().hex}.txt"
    environment = {**fresh_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": finds}
    process = start_script(
        path,
        *words,
        folder=folder,
        output=output,
        environment=environment,
        ranks=ranks,
        prelude=partial(import_each, imports),
    )
    assert process.pid is not None
    try:
        process.join(timeout=SECONDS)
        assert process.exitcode is not None, f"still running after {SECONDS} s:\n{output.read_text()}"
        deadline = time.monotonic() + 10  # a rank may end a little after the one that started it
        while left := still_running(process.pid):
            assert time.monotonic() < deadline, f"{left} were left behind:\n{output.read_text()}"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the script and what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    told = output.read_text()
    assert process.exitcode == status, told
    return told


def import_each(names: tuple[str, ...]) -> None:
    for name in names:
        import_module(name)


def still_running(session: int) -> list[psutil.Process]:
    """The processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found
