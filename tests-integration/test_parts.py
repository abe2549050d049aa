"""Which tests ``nox -s tests`` and ``nox -s everything`` run, and what a test may cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_core.testing.launching.processes import fresh_environment
from tools import steps
from tools.cpu_time import tree_seconds
from tools.selection import is_drawn

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["fsdp"]

CONFTEST = """
import pytest
from tools import costs

pytest_plugins = ["tools.selection", "tools.costs"]
costs.file_budgets = lambda: {"test_c.py": 9.0, "test_b.py": 0.0}
costs._EVERY, costs._GRACE = 0.2, 2.0

def pytest_configure(config):
    config.addinivalue_line("markers", "fsdp_scripts: of the kit")

@pytest.fixture(scope="session")
def _rank_pools(): ...

@pytest.fixture
def ranks(_rank_pools): ...
"""

CLAUSES = """
import pytest

class Suite:
    @pytest.mark.parametrize("n", range(8))
    def test_further(self, ranks, n): ...

    def test_alone(self, ranks): ...

    @pytest.mark.parametrize("n", range(3))
    def test_without_ranks(self, n): ...

    @pytest.mark.everything
    def test_long(self): ...

    @pytest.mark.fsdp_scripts
    def test_of_a_script(self): ...

class TestNative(Suite):
    strategy = "fsdp_native"

class TestFSDP2(Suite):
    strategy = "fsdp2"

class TestSPMD(Suite):
    strategy = "xla_fsdp_spmd"
"""


def run_pytest(
    folder: Path, source: str, *words: str, name: str = "test_a.py", **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / name).write_text(dedent(source))
    words = ("-v", "-rN", "-p", "no:cacheprovider", f"--rootdir={folder}", *words, str(folder))
    environment = {**fresh_environment(), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def collect(folder: Path, *words: str, source: str = CLAUSES) -> set[str]:
    """What would run of the tests: ``TestNative::test_alone`` and so on."""
    run = run_pytest(folder, source, "--collect-only", "--quiet", "--quiet", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    return {line.removeprefix("test_a.py::") for line in run.stdout.splitlines() if "::" in line}


def test_parts_have_nothing_in_common_and_strategies_share_what_is_drawn(tmp_path: Path) -> None:
    fast, rest, whole = (collect(tmp_path, f"--part={part}") for part in ("tests", "everything", "all"))
    assert not fast & rest
    assert fast | rest < whole
    names = ("TestNative", "TestFSDP2", "TestSPMD")
    for name in names:
        unparametrized = {f"{name}::test_alone", f"{name}::test_further[0]"}
        assert {test for test in fast if test.startswith(name)} == unparametrized | {
            f"{name}::test_without_ranks[{n}]" for n in range(3)
        }
        assert f"{name}::test_long" in rest
    for clause in (*(f"test_further[{n}]" for n in range(1, 8)), "test_of_a_script"):
        assert [f"{name}::{clause}" in rest for name in names].count(True) == 1, clause


@pytest.mark.parametrize(
    ("suite", "strategies"),
    [("TestIt", ("fsdp2", "fsdp_native", "xla_fsdp")), ("TestAdaptersOverIt", ("fsdp2", "loopback"))],
)
def test_what_all_strategies_of_a_suite_take_is_the_whole(suite: str, strategies: tuple[str, ...]) -> None:
    for position, seed in product(range(8), (1, 17)):
        classes = [SimpleNamespace(strategy=each, __name__=suite) for each in strategies]
        items: list[Any] = [
            SimpleNamespace(name="test_further", cls=each, iter_markers=lambda name: []) for each in classes
        ]
        assert [is_drawn(item, position, seed) for item in items].count(True) == 1


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native", "xla_fsdp", "of_a_vendor"])
def test_three_seeds_in_a_row_draw_every_pair(strategy: str) -> None:
    item: Any = SimpleNamespace(name="test_further", cls=SimpleNamespace(strategy=strategy))
    for position, seed in product(range(8), (1, 17)):
        assert [is_drawn(item, position, seed + turn) for turn in range(3)].count(True) == 1


DRAWN = """
import pytest

@pytest.mark.drawn
@pytest.mark.parametrize("n", range(5))
def test_of_five(n): ...

@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_of_two(strategy): ...

@pytest.mark.drawn
def test_of_none(): ...

@pytest.mark.parametrize("n", range(2))
def test_whole(n): ...
"""


def test_three_seeds_in_a_row_draw_all_sets_of_parameters_and_each_seed_some(tmp_path: Path) -> None:
    first, second, third = (collect(tmp_path, "--part=drawn", f"--pairs-seed={n}", source=DRAWN) for n in (7, 8, 9))
    assert first & second & third == {"test_of_none", "test_whole[0]", "test_whole[1]"}
    of_five, of_two = (
        [{test for test in run if test.startswith(f"test_of_{n}")} for run in (first, second, third)]
        for n in ("five", "two")
    )
    assert sorted(map(len, of_five)) == [1, 2, 2]
    assert set[str]().union(*of_five) == {f"test_of_five[{n}]" for n in range(5)}
    assert [len(run) for run in of_two] == [1, 1, 1]
    assert of_two[0] | of_two[1] == {"test_of_two[fsdp2]", "test_of_two[fsdp_native]"}


STUBBORN = """
def test_stubborn():
    costs._GRACE = 0.3
    for _ in range(10**9):
        try:
            sum(number for number in range(10**5))
        except BaseException:
            print("caught")
"""


@pytest.mark.parametrize("workers", [[], ["-n1", "--dist=loadfile", "--max-worker-restart=0"]], ids=["here", "worker"])
def test_a_test_that_catches_everything_ends_with_its_process_which_says_why(
    tmp_path: Path, workers: list[str]
) -> None:
    run = run_pytest(tmp_path, LIMITED + STUBBORN + "\ndef test_after(): ...\n", *workers)
    assert run.returncode == 1
    assert "::test_stubborn: it has used more than 0.5 CPU seconds, or" in run.stderr
    assert "it can't be interrupted, so its process ends" in run.stderr


def test_the_cpu_time_of_a_process_with_any_name_is_counted(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path / "caf") + b"\xc3) 1"
    Path(os.fsdecode(script)).write_text("#!/bin/sh\nread _\n")
    Path(os.fsdecode(script)).chmod(0o700)
    with subprocess.Popen([script], stdin=subprocess.PIPE) as process:
        assert tree_seconds(os.getpid()) >= sum(os.times()[:2])
        assert tree_seconds(process.pid) < 1.0
        process.communicate(b"\n")


LIMITED = "import pytest, subprocess, sys, threading, time\nfrom tools import costs\n@pytest.mark.cpu_limit(0.5)\n"
SPINS = """
def test_spins():
    while True:
        time.process_time()
"""
SPINS_ELSEWHERE = """
def test_spins_elsewhere():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            process.wait()
        finally:
            process.kill()
"""
WAITS = """
def test_waits():
    costs.WAITING_LIMIT = 2.0
    threading.Event().wait()
"""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["here", "in a worker"])
def test_a_test_is_ended_that_uses_too_much_or_waits_for_nothing(tmp_path: Path, workers: list[str]) -> None:
    limit = LIMITED.splitlines()[-1]
    run = run_pytest(tmp_path, f"{LIMITED}{SPINS.strip()}\n{limit}{SPINS_ELSEWHERE}{limit}{WAITS}", *workers)
    assert run.returncode == 1
    assert "3 failed" in run.stdout
    assert run.stdout.count("used more than 0.5 CPU seconds, or") == 2
    assert run.stdout.count("it has waited for 2 s, and its processes have done nothing") == 1


def test_cpu_seconds_are_not_limited_on_another_device(tmp_path: Path) -> None:
    spins = f"{LIMITED}def test_spins():\n    while time.process_time() < 1.5: ...\n"
    run = run_pytest(tmp_path, spins, FSDP_TESTS_ACCELERATOR="cuda")
    assert run.returncode == 0, run.stdout


def test_a_test_that_sleeps_longer_than_its_limit_passes(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, f"{LIMITED}def test_sleeps(): time.sleep(1.5)\n")
    assert run.returncode == 0, run.stdout


USES = """
import time

def test_uses():
    until = time.process_time() + 0.3
    while time.process_time() < until: ...
"""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["here", "in a worker"])
def test_the_dearest_are_written_and_a_file_over_its_budget_is_named(tmp_path: Path, workers: list[str]) -> None:
    """And the longest are begun first."""
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(USES)
    costs = tmp_path / "costs.json"
    run = run_pytest(tmp_path, USES, f"--costs={costs}", "-k", "uses", *workers, name="test_c.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_b.py: 0 s, budget 0 s" in run.stdout
    assert "test_a.py: " not in run.stdout
    report: dict[str, Any] = json.loads(costs.read_text())
    assert report["left"] == 0
    assert report["tests"].keys() == {f"test_{name}.py::test_uses" for name in "abc"}
    assert all(0.2 < used < 3 for used in report["tests"].values())
    assert 0.8 < report["cpu"] < 20
    if not workers:
        began = [line.split("::")[0] for line in run.stdout.splitlines() if "::test_uses" in line]
        assert began == ["test_c.py", "test_a.py", "test_b.py"]


def test_budgets_are_of_files_that_are_there() -> None:
    assert [file for file in SETTINGS["cpu-seconds"] if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("used", "speed", "fails"), [(109, 1.0, False), (111, 1.0, True), (111, 1.1, False), (122, 1.1, True)], ids=str
)
def test_more_cpu_seconds_than_a_tenth_above_the_budget_fail(
    monkeypatch: pytest.MonkeyPatch, used: int, speed: float, fails: bool
) -> None:
    monkeypatch.setattr(steps, "read_settings", lambda: {"tests-cpu-seconds": 100})
    monkeypatch.setattr(steps, "relative_speed", lambda: speed)
    errors: list[str] = []
    session: Any = SimpleNamespace(error=errors.append)
    steps.check_budget(session, [steps.Step(name="a", passed=True, seconds=1, cpu=used)])
    assert ["raise tests-cpu-seconds in pyproject.toml" in error for error in errors] == [True] * fails
