"""How long each file of tests may take: the longest are begun first, and one that takes longer than that is named.

The seconds stand in ``pyproject.toml`` under ``[tool.fsdp.test-seconds]``, for two quiet cores. Nothing fails for
taking longer, since machines differ; whoever sees a file named makes it cheaper, or raises its budget in the
same change.
"""

from __future__ import annotations

import gc
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

#: What a file may take that is not listed.
OTHERS = 15.0

_ROOT = Path(__file__).parent

# Until the tests are collected, their modules import torch and Lightning. Looking for garbage among what is imported
# takes a quarter of that time.
gc.disable()


def budgets() -> dict[str, float]:
    """Seconds by file, relative to the repository."""
    pyproject = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed: dict[str, float] = pyproject["tool"]["fsdp"]["test-seconds"]
    return listed


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Budgets(budgets()))


class _Budgets:
    """Follows one session; also where pytest-xdist runs tests in other processes, whose reports come here."""

    def __init__(self, listed: dict[str, float]) -> None:
        self._listed = listed
        self._took: dict[str, float] = defaultdict(float)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self._listed.get(item.nodeid.split("::")[0], 0.0))

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.enable()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.split("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = {file: took for file, took in self._took.items() if took > self._listed.get(file, OTHERS)}
        if over:
            terminalreporter.section("files over their time budget")
        for file, took in sorted(over.items(), key=lambda one: -one[1]):
            terminalreporter.write_line(f"{file}: {took:.0f} s, budget {self._listed.get(file, OTHERS):.0f} s")
