"""A session of pytest inside another one: it runs chosen clauses for backends, and returns how each has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_core.plugins.discovery import discover
from fsdp_core.testing.suite.numerics.pairs import COUNT, SEED

__all__ = ["Outcome", "plugins_in", "run_clauses"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a clause has ended.

    Attributes:
        result: ``"passed"``, ``"failed"`` or ``"skipped"``.
        failing_lines: The lines that failed, with pytest's explanation.
    """

    result: str
    failing_lines: str


@dataclass
class _Session:
    """Follows the session inside."""

    chosen: set[tuple[str, str]]
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(str(report.longrepr))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if (item.cls.strategy, item.name) in self.chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call" or not report.passed:
            lines = str(report.longrepr).splitlines()
            failing_lines = "\n".join(line for line in lines if line.startswith((">", "E")))
            self.outcomes[item.cls.strategy, item.name] = Outcome(
                result=report.outcome, failing_lines=failing_lines or str(report.longrepr)
            )
        return report


@contextmanager
def plugins_in(*folders: Path) -> Iterator[None]:
    """A context in which this process, its ranks and its subprocesses look for plugins in further folders."""
    paths = list(map(str, folders))
    search_path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.object(sys, "path", [*paths, *sys.path]), mock.patch.dict(os.environ, PYTHONPATH=search_path):
        for variable in (COUNT, SEED):  # the clauses' names are those of the suite's own draw
            os.environ.pop(variable, None)
        discover.cache_clear()
        try:
            yield
        finally:
            discover.cache_clear()


def run_clauses(folder: Path, source: str, chosen: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Run clauses.

    Args:
        folder: An empty folder.
        source: A module with a class of the suite for each strategy.
        chosen: Strategies, each with the name of a clause as pytest shows it.

    Returns:
        How each has ended; without those that were not found.
    """
    session = _Session(set(chosen))
    file = folder / "test_clauses.py"
    file.write_text(source)
    # These plugins would change the outer session's output, timers and handlers.
    disabled_plugins = ("cacheprovider", "xdist", "timeout", "faulthandler", "unraisableexception", "threadexception")
    plugin_options = [word for name in disabled_plugins for word in ("-p", f"no:{name}")]
    arguments = ["-vv", "-s", f"--rootdir={folder}", "-c", os.devnull, f"--basetemp={folder / 'tmp'}", *plugin_options]
    pytest.main([str(file), *arguments], plugins=[session])
    assert not session.errors, "\n".join(session.errors)
    return session.outcomes
