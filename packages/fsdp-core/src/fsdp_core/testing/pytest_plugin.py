"""The pytest plugin of the suite, registered by an entry point: a ``conftest.py`` need not name it.

Every pytest in an environment with fsdp-core loads this module, so it imports neither torch nor the suite.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing import RankPool, Ranks
from fsdp_core.testing.launching import forking
from fsdp_core.testing.reporting.collecting import CLAUSE, choose_clauses, clauses_of, refuse_skipped
from fsdp_core.testing.reporting.results import FORMATS, Results

__all__ = ["ranks"]

pytest.register_assert_rewrite("fsdp_core.testing.suite")


@pytest.fixture(scope="session")
def _rank_pools() -> Iterator[Callable[[type[Ranks]], Ranks]]:
    """Returns the only pool of a class, which lives for the whole session."""
    pools: dict[type[Ranks], Ranks] = {}

    def pool_of(pool_class: type[Ranks]) -> Ranks:
        if pool_class not in pools:
            pools[pool_class] = pool_class()
        return pools[pool_class]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(_rank_pools: Callable[[type[Ranks]], Ranks]) -> Ranks:
    """Ranks that live for the whole session: processes over gloo or, in the suite's classes, what the class chooses."""
    return _rank_pools(RankPool)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fsdp", "conformance of sharded strategies").addoption(
        "--fsdp-report",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="Write the results of the conformance suite to FILE.html or FILE.json. May be given several times.",
    )

    parser.addini(
        "fsdp_preload",
        "modules besides torch and Lightning to import in the process that ranks are forked from",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fsdp_requires(*needs): the capabilities and options that a clause needs")
    config.addinivalue_line("markers", "fsdp_ranks(*kinds): the kinds of ranks that a clause applies to")
    config.addinivalue_line("markers", "everything: a clause that takes long, for runs that choose")
    config.addinivalue_line("markers", "fsdp_scripts: a clause that starts scripts as users do")
    config.addinivalue_line("markers", "fsdp_undeclared(capability): a clause for strategies that lack a capability")
    files: list[Path] = config.getoption("--fsdp-report")
    for file in files:
        if file.suffix not in FORMATS:
            raise pytest.UsageError(f"--fsdp-report={file} has an unknown suffix.\nName it FILE.html or FILE.json.")
    forking.preloads += config.getini("fsdp_preload")
    forking.tests_will_run = not config.option.collectonly
    config.pluginmanager.register(_Conformance([config.invocation_params.dir / file for file in files]))


class _Conformance:
    """Tracks the clauses through a session, including those that pytest-xdist runs in other processes."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._results = Results()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        report = yield
        cls = clauses_of(getattr(collector, "obj", None)) if isinstance(collector, pytest.Class) else None
        if cls is not None and report.passed:
            try:
                report.result = choose_clauses(cls, report.result)
            except Exception as error:
                report.outcome = "failed"
                report.longrepr = str(error)
                report.result = []
            self._results.expect(report.result)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        refuse_skipped(item, report)
        if CLAUSE in item.stash and report.when == "setup":
            report.fsdp_clause = item.stash[CLAUSE]  # type: ignore[attr-defined]
        if report.failed and CLAUSE in item.stash:
            report.sections.append(("To repeat it alone, type", f"python -m pytest {shlex.quote(item.nodeid)}"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._results.take(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._results.expected.update(getattr(node, "workeroutput", {}).get("fsdp_clauses", {}))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["fsdp_clauses"] = self._results.expected
            return
        self._results.interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        for file in self._files:
            self._results.write(file)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for file in self._files:
            terminalreporter.write_line(f"conformance report: {file}")
