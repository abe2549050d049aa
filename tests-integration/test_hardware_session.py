"""``nox -s hardware`` on a machine without that hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(Path("/dev/nvidia0").exists() or Path("/dev/accel0").exists(), reason="this machine has it")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["xla"], ["no TPU is attached", "On a TPU VM, type", "python -m nox -s tests -- fsdp-xla"]),
        (["cuda"], ["no CUDA device here", "On a machine with a GPU or more, type", "tests -- fsdp-fsdp2", "-s card"]),
        ([], ["python -m nox -s hardware -- xla", "-- cuda"]),
    ],
)
def test_it_says_what_is_missing_and_what_to_type(words: list[str], told: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
    command = [sys.executable, "-m", "nox", "-s", "hardware", "--", *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    for line in told:
        assert line in run.stdout + run.stderr
