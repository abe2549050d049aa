"""A session of pytest inside this one: it runs chosen clauses for the mutants, and for the backend that they are of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_core.plugins.discovery import discover
from fsdp_core.testing import RankPool, forking
from fsdp_core.testing.suite.numerics.pairs import COUNT, SEED

__all__ = ["SOUND", "Outcome", "installed", "run"]

#: The strategy that the mutants are mutants of.
SOUND = "loopback"

#: What ranks would import when they are started anew; Lightning imports s3fs to see if a checkpoint's path is on S3.
PRELOADED = ("mutants.strategies", "s3fs")

#: The ranks of the session inside.
POOL: list[RankPool] = []

_ENTRY_POINTS = "[fsdp.strategies]\nmutants = mutants.plugin\n"

_MODULE = """\
import pytest

pytest.register_assert_rewrite("adapter_clauses")

from adapter_clauses import AdapterSuite
from fsdp_core.testing.suite import StrategySuite
from mutants.running import POOL


@pytest.fixture(scope="session")
def ranks():
    return POOL[0]


def suite_with(clause):
    bases = (*StrategySuite.__mro__, *AdapterSuite.__mro__)
    return next(base for base in bases if clause in vars(base))


classes = dict.fromkeys((suite_with(clause), strategy) for strategy, clause in CHOSEN)
for number, (suite, strategy) in enumerate(classes):
    globals()[f"Test{number}"] = type(f"Test{number}", (suite,), {"strategy": strategy, "__module__": __name__})
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a clause has ended.

    Attributes:
        result: ``"passed"``, ``"failed"`` or ``"skipped"``.
        said: The lines that failed, and what was wrong with them.
        seconds: How long it took.
    """

    result: str
    said: str
    seconds: float


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
            self.outcomes[item.cls.strategy, item.name] = Outcome(
                result=report.outcome, said=said or str(report.longrepr), seconds=report.duration
            )
        return report


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """A context in which loopback and the mutants are installed, for this process, its ranks and its subprocesses."""
    from lightning.fabric import strategies as of_fabric
    from lightning.pytorch import strategies as of_trainer

    from fsdp_core.lightning.registration.entries import enter

    info = folder / "mutants-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    tests = Path(__file__).parent.parent
    places = [str(folder), str(tests), str(tests / "loopback_site")]
    searched = [*places, *filter(None, [os.environ.get("PYTHONPATH")])]
    registries: list[Any] = [of_fabric.STRATEGY_REGISTRY, of_trainer.StrategyRegistry]
    with (
        mock.patch.object(sys, "path", [*places, *sys.path]),
        mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(searched)),
    ):
        for variable in (COUNT, SEED):  # the table's clauses are of the draw that the suite makes by itself
            os.environ.pop(variable, None)
        discover.cache_clear()
        for module in (of_fabric, of_trainer):
            enter(module)
        try:
            yield
        finally:
            discover.cache_clear()
            for registry in registries:
                for name in [name for name in registry if name == SOUND or name.startswith(f"{SOUND}_")]:
                    del registry[name]
            discover.cache_clear()


def run(folder: Path, chosen: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Run clauses.

    Args:
        folder: An empty folder.
        chosen: Strategies, each with the name of a clause as pytest shows it.

    Returns:
        How each has ended; without those that were not found.
    """
    session = _Session(set(chosen))
    folder.mkdir(exist_ok=True)
    file = folder / "test_clauses.py"
    clauses = sorted({(strategy, clause.partition("[")[0]) for strategy, clause in session.chosen})
    file.write_text(f"CHOSEN = {clauses}\n\n{_MODULE}")
    # plugins that would take over what is this session's: output, timers, handlers
    without = ("cacheprovider", "xdist", "timeout", "faulthandler", "unraisableexception", "threadexception")
    quiet = [word for name in without for word in ("-p", f"no:{name}")]
    preloads = mock.patch.object(forking, "preloads", [*forking.preloads, *PRELOADED])
    with installed(folder / "site"), preloads, RankPool() as pool:
        POOL[:] = [pool]
        pytest.main(
            [str(file), "-vv", "-s", f"--rootdir={folder}", "-c", os.devnull, f"--basetemp={folder / 'tmp'}", *quiet],
            plugins=[session],
        )
        POOL.clear()
    assert not session.errors, "\n".join(session.errors)
    return session.outcomes
