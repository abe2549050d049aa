"""Files of tests have budgets of seconds, and what is left to the slow run exists."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fsdp_core.testing.processes import fresh_environment

ROOT = Path(__file__).parent.parent
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["fsdp"]["test-seconds"]


def slow_tests() -> list[tuple[str, list[str]]]:
    """What each package leaves to the slow run, with the interpreter that has what its tests import.

    Package by package, as the slow run is: files of several have one name.
    """
    found: list[tuple[str, list[str]]] = []
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        tests = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["fsdp"]["tests"]
        variable = f"{file.parent.name.replace('-', '_').upper()}_PYTHON"
        python = os.environ[variable] if "constraints" in tests else sys.executable
        folder = file.parent.relative_to(ROOT).as_posix()
        found.append((python, [f"{folder}/{test}" for test in tests.get("slow", ())]))
    return [(python, tests) for python, tests in found if tests]


TESTS = """
import time

def test_slow():
    time.sleep(0.2)
"""


@pytest.mark.parametrize("file", LISTED)
def test_budgets_are_of_files_that_are_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_what_is_left_to_the_slow_run_is_there() -> None:
    for python, tests in slow_tests():
        command = (python, "-m", "pytest", "-q", "--collect-only", *tests)
        done = subprocess.run(command, cwd=ROOT, env=fresh_environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        collected = [line for line in done.stdout.splitlines() if "::" in line]
        for test in tests:
            assert any(line == test or line.startswith(f"{test}[") for line in collected), test


def test_a_file_over_its_budget_is_named_and_fails_nothing(tmp_path: Path) -> None:
    """And the longest are begun first."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "pyproject.toml").write_text('[tool.fsdp.test-seconds]\n"test_c.py" = 9\n"test_b.py" = 0.1\n')
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=fresh_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files over their time budget" in done.stdout
    assert "test_b.py: 0 s, budget 0 s" in done.stdout
    assert "test_a.py: " not in done.stdout
    began = [line.split("::")[0] for line in done.stdout.splitlines() if "::test_slow" in line]
    assert began == ["test_c.py", "test_b.py", "test_a.py"]
