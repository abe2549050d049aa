"""Runs scripts on XLA's CPU devices, forked from one process that has imported torch_xla.

torch_xla needs a torch of its own. ``python -m nox -s integration`` makes an environment with both, and says in
``FSDP_XLA_PYTHON`` where its interpreter is. :func:`main` runs there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from select import select

from fsdp_core.testing.launching import forking
from fsdp_core.testing.launching.processes import fresh_environment

__all__ = ["XLAScripts"]

SECONDS = 200


class XLAScripts:
    """Runs scripts, one after the other. The process that forks them is started by the first."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, path: Path, *words: str, folder: Path, devices: int) -> None:
        """Run a script to its end.

        Args:
            path: The script.
            *words: What follows its name.
            folder: The working directory.
            devices: How many devices it has.
        """
        if self._server is None:
            self._server = start_server()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        output = folder / "output.txt"
        json.dump([str(path), str(folder), str(output), devices, *words], self._server.stdin)
        print(file=self._server.stdin, flush=True)
        answers, *_ = select([self._server.stdout], [], [], SECONDS)
        status = self._server.stdout.readline().strip() if answers else f"no answer within {SECONDS} s"
        told = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        assert status == "0", f"{path.name} {' '.join(words)}: {status or 'the process that forks it has died'}\n{told}"

    def close(self) -> None:
        """End the process, and a script that it still runs."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def start_server() -> subprocess.Popen[str]:
    python = os.environ.get("FSDP_XLA_PYTHON")
    assert python, "FSDP_XLA_PYTHON names no interpreter with fsdp-xla; type: python -m nox -s integration"
    return subprocess.Popen(
        [python, __file__],
        env={name: value for name, value in fresh_environment().items() if name not in ("PYTHONPATH", "PJRT_DEVICE")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    """Run a script for each line of stdin, and say in a line how it has ended."""
    forking.preloads.append("torch_xla")
    for line in sys.stdin:
        path, folder, output, devices, *words = json.loads(line)
        script = forking.start_script(
            Path(path),
            *words,
            folder=Path(folder),
            output=Path(output),
            environment={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)},
        )
        script.join()
        print(script.exitcode, flush=True)


if __name__ == "__main__":
    main()
