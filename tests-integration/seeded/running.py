"""A session of pytest inside this one: it runs chosen clauses for backends that are seeded with faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_core.plugins.discovery import discover
from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.numerics.pairs import COUNT, SEED
from seeded.changes import Change, write_packages

__all__ = ["POOL", "Outcome", "run"]

_TESTS = Path(__file__).parent.parent

#: The ranks of the session inside.
POOL: list[RankPool] = []

_MODULE = """\
import pytest
from fsdp_core.testing.suite import StrategySuite
from seeded.running import POOL


@pytest.fixture(scope="session")
def ranks():
    return POOL[0]


for strategy in STRATEGIES:
    settings = {"strategy": strategy, "__module__": __name__}
    globals()[f"Test_{strategy}"] = type(f"Test_{strategy}", (StrategySuite,), settings)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a clause has ended.

    Attributes:
        result: ``"passed"``, ``"failed"`` or ``"skipped"``.
        said: The lines that failed, and what was wrong with them.
    """

    result: str
    said: str


@dataclass
class _Session:
    """Follows the session inside."""

    chosen: set[tuple[str, str]]
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.errors += [str(report.longrepr)] if report.failed else []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if (item.cls.strategy, item.name) in self.chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report = yield
        if report.when == "call" or not report.passed:
            lines = str(report.longrepr).splitlines()
            said = "\n".join(line for line in lines if line.startswith((">", "E")))
            outcome = Outcome(result=report.outcome, said=said or str(report.longrepr))
            self.outcomes[item.cls.strategy, item.name] = outcome
        return report


@contextmanager
def _installed(folder: Path, faults: Mapping[tuple[str, str], tuple[Change, ...]]) -> Iterator[None]:
    """A context in which the seeded backends are installed, for this process and its ranks."""
    folder.mkdir()
    write_packages(folder, faults)
    places = [str(folder), str(_TESTS)]
    searched = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.object(sys, "path", [*places, *sys.path]), mock.patch.dict(os.environ, PYTHONPATH=searched):
        for variable in (COUNT, SEED):  # what the table names is of the draw that the suite makes by itself
            os.environ.pop(variable, None)
        discover.cache_clear()
        try:
            yield
        finally:
            discover.cache_clear()


def run(
    folder: Path, faults: Mapping[tuple[str, str], tuple[Change, ...]], chosen: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Outcome]:
    """Run clauses.

    Args:
        folder: An empty folder.
        faults: What to seed, as :func:`write_packages` takes it.
        chosen: Strategies, each with the name of a clause as pytest shows it.

    Returns:
        How each has ended; without those that were not found.
    """
    session = _Session(set(chosen))
    strategies = sorted({strategy for strategy, _ in session.chosen})
    file = folder / "test_clauses.py"
    file.write_text(f"STRATEGIES = {strategies}\n\n{_MODULE}")
    # plugins that would take over what is this session's: output, timers, handlers
    without = ("cacheprovider", "xdist", "timeout", "faulthandler", "unraisableexception", "threadexception")
    quiet = [word for name in without for word in ("-p", f"no:{name}")]
    with _installed(folder / "site", faults), RankPool() as pool:
        POOL[:] = [pool]
        words = ["-vv", "-s", f"--rootdir={folder}", "-c", os.devnull, f"--basetemp={folder / 'tmp'}", *quiet]
        pytest.main([str(file), *words], plugins=[session])
        POOL.clear()
    assert not session.errors, "\n".join(session.errors)
    return session.outcomes
