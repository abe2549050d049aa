"""What tests cost: a limit of CPU seconds for each, a budget for each file, and the dearest at the end.

A test has a limit by CPU time, which a busy machine does not reach sooner. One that waits for something that does not
come uses none: it is ended when its processes have used less than a second in five minutes.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tools.cpu_time import tree_seconds

__all__ = ["Costs", "file_budgets"]

#: CPU seconds that a test may use, without a mark ``cpu_limit``; and those that a file may, which is not in the table.
TEST_LIMIT, FILE_BUDGET = 60.0, 10.0

#: Ranks on another device than the CPU use a core each while they wait for each other: no test is limited by that.
ON_DEVICE = os.environ.get("FSDP_TESTS_ACCELERATOR", "cpu") != "cpu"

#: A test whose processes have used less than ``_IDLE`` CPU seconds in so many seconds waits for nothing.
WAITING_LIMIT, _IDLE = 300.0, 1.0

#: Seconds between two looks at what a test has used, and after which a test that does not end ends with its process.
_EVERY, _GRACE = 2.0, 20.0

_ROOT = Path(__file__).parent.parent


def file_budgets() -> dict[str, float]:
    """CPU seconds by file, relative to the repository, from ``[tool.fsdp.cpu-seconds]``."""
    pyproject = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets: dict[str, float] = pyproject["tool"]["fsdp"]["cpu-seconds"]
    return budgets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("parts").addoption(
        "--costs",
        metavar="FILE",
        type=Path,
        help="write how many tests were left, and what each that ran has cost, as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"cpu_limit(seconds): CPU seconds that a test may use; otherwise {TEST_LIMIT:g}")
    config.pluginmanager.register(Costs(file_budgets(), config.getoption("--costs")), "costs of tests")


class Costs:
    """Follows one session; also where pytest-xdist runs tests in other processes, whose reports come here.

    Args:
        budgets: CPU seconds by file.
        output: Where the costs are written to.
    """

    def __init__(self, budgets: dict[str, float], output: Path | None) -> None:
        self._budgets = budgets
        self._output = output
        self._seconds: dict[str, float] = {}
        self._left = 0
        self._used = self._of_workers = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self._budgets.get(_file_of(item.nodeid), 0.0))  # the longest begin

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left += len(items)

    def pytest_collection_finish(self) -> None:
        self._used = tree_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker("cpu_limit")
        with _limited(item, math.inf if ON_DEVICE else mark.args[0] if mark else TEST_LIMIT):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.when == "teardown":  # the report that comes last tells of all three
            used = tree_seconds(os.getpid())
            item.user_properties.append(("cpu", max(0.0, used - self._used)))
            self._used = used
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu":
                self._seconds[report.nodeid] = float(value)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        self._left = max(self._left, output.get("tests_left", 0))  # all collect the same
        self._of_workers += output.get("cpu", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["tests_left"] = self._left
            output["cpu"] = tree_seconds(os.getpid())
        elif self._output is not None:
            # workers are also this process's children, which end by and by
            used = self._of_workers + time.process_time() if self._of_workers else tree_seconds(os.getpid())
            costs = {"left": self._left, "tests": self._seconds, "cpu": used}
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(costs), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self._seconds.items():
            files[_file_of(test)] += seconds
        over = {file: used for file, used in files.items() if used > self._budgets.get(file, FILE_BUDGET)}
        if over:
            terminalreporter.section("no failure: files over their budget of CPU seconds, in pyproject.toml")
        for file, used in sorted(over.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{file}: {used:.0f} s, budget {self._budgets.get(file, FILE_BUDGET):g} s")


def _file_of(test: str) -> str:
    return test.split("::")[0]


@contextmanager
def _limited(item: pytest.Item, limit: float) -> Iterator[None]:
    """A context in which a test fails that uses too much, or waits for nothing; if it can't fail, its process ends.

    One that holds Python's lock, in a call that does not return, is not ended: the thread that looks needs it too.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    thread, done = threading.get_ident(), threading.Event()
    reasons: list[str] = []

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(reasons[0] if reasons else f"signal {number}")

    def watch() -> None:
        first = before = tree_seconds(os.getpid())
        changed = time.monotonic()
        while not done.wait(_EVERY):
            used, now = tree_seconds(os.getpid()), time.monotonic()
            if used - before > _IDLE:
                before, changed = used, now
            if used - first > limit:
                reasons.append(
                    f"it has used more than {limit:g} CPU seconds, or a process has that an earlier test has left: "
                    "make it cheaper, or mark it cpu_limit(...)"
                )
            elif now - changed > WAITING_LIMIT:
                reasons.append(f"it has waited for {WAITING_LIMIT:g} s, and its processes have done nothing")
            if reasons:
                signal.pthread_kill(thread, signal.SIGXCPU)
                if not done.wait(_GRACE):
                    item.config.pluginmanager.get_plugin("capturemanager").suspend_global_capture()
                    sys.__stderr__.write(
                        f"\n{item.nodeid}: {reasons[0]}; it can't be interrupted, so its process ends\n"
                    )
                    faulthandler.dump_traceback(sys.__stderr__)
                    os._exit(1)
                return

    before = signal.signal(signal.SIGXCPU, fail)
    watcher = threading.Thread(target=watch, name="limit of a test", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGXCPU, before)
