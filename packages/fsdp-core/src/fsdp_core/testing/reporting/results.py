"""The report of a conformance run: the outcome of each clause, and the result for each capability."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing.reporting.collecting import CLAUSE
from fsdp_core.testing.reporting.page import page

__all__ = ["FORMATS", "Results"]

FORMATS = (".html", ".json")

_VERSIONS_OF = ("fsdp-core", "torch", "lightning", "pytest")


class Results:
    """The outcomes of the clauses in one pytest session.

    Attributes:
        expected: The description of each collected clause, by test ID, whether or not it was run.
        interrupted: Whether the session was interrupted, so that clauses may be missing.
    """

    def __init__(self) -> None:
        self.expected: dict[str, dict[str, Any]] = {}
        self.interrupted = False
        self._outcomes: dict[str, dict[str, Any]] = {}

    def expect(self, items: Iterable[pytest.Item]) -> None:
        """Record the clauses among the collected tests."""
        clauses = [item.stash[CLAUSE] for item in items if CLAUSE in item.stash]
        self.expected.update({clause["test"]: clause for clause in clauses})

    def take(self, report: pytest.TestReport) -> None:
        """Record pytest's report of one phase of a test: setup, call or teardown."""
        clause: dict[str, Any] | None = getattr(report, "fsdp_clause", None)
        if clause is not None:  # pytest-xdist's workers send all clauses only at their end, which an interrupt prevents
            self.expected.setdefault(report.nodeid, clause)
        entry = self._outcomes.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "seconds": 0.0})
        entry["seconds"] += report.duration
        if report.failed:
            entry |= {"outcome": "failed", "reason": _message(report)}
        elif report.skipped and entry["outcome"] != "failed":
            xfail_reason = getattr(report, "wasxfail", None)
            if xfail_reason is not None:
                entry |= {"outcome": "failed as expected", "reason": xfail_reason}
            else:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                entry |= {"outcome": "skipped", "reason": reason.removeprefix("Skipped: ")}

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-serializable data."""
        suites: dict[str, list[dict[str, Any]]] = {}
        for test, clause in self.expected.items():
            suites.setdefault(clause["suite"], []).append(self._row(test, clause))
        return {
            "format": 1,
            "versions": {name: _version(name) for name in _VERSIONS_OF}
            | {"python": platform.python_version(), "platform": platform.platform()},
            "suites": [_suite(name, rows, self.interrupted) for name, rows in suites.items()],
        }

    def write(self, file: Path) -> None:
        """Write the report as HTML or JSON, depending on the file's suffix."""
        report = self.as_dict()
        file.parent.mkdir(parents=True, exist_ok=True)
        text = page(report) if file.suffix == ".html" else json.dumps(report, indent=1) + "\n"
        file.write_text(text, encoding="utf-8")

    def _row(self, test: str, clause: Mapping[str, Any]) -> dict[str, Any]:
        entry = self._outcomes.get(test, {"outcome": "not run", "reason": "", "seconds": 0.0})
        if clause["does_not_apply"]:
            entry = entry | {"outcome": "does not apply", "reason": clause["does_not_apply"]}
        keys = ("subject", "clause", "strategy", "preset_of", "ranks", "needs", "refuses")
        return {**{key: clause[key] for key in keys}, **entry, "seconds": round(entry["seconds"], 3)}


def _suite(name: str, rows: list[dict[str, Any]], interrupted: bool) -> dict[str, Any]:
    strategy = rows[0]["strategy"]
    preset_of = rows[0]["preset_of"]
    info = registry.describe(strategy)
    totals = Counter(row["outcome"] for row in rows)
    clauses = [
        {key: value for key, value in row.items() if key not in ("strategy", "preset_of", "ranks")} for row in rows
    ]
    return {
        "suite": name,
        "strategy": strategy,
        "preset_of": preset_of,
        "ranks": rows[0]["ranks"],
        "summary": info.summary,
        "package": str(registry.provider(strategy)),
        "verdict": _verdict(totals, interrupted),
        "totals": dict(totals),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "capabilities": [
            _capability(capability, capability in info.capabilities, rows, preset_of, interrupted)
            for capability in Capability
        ],
        "clauses": clauses,
    }


def _verdict(totals: Mapping[str, int], interrupted: bool) -> str:
    if totals.get("failed"):
        return "failed"
    if totals.get("not run") or interrupted:
        return "incomplete"
    return "passed with expected failures" if totals.get("failed as expected") else "passed"


def _capability(
    capability: Capability, declared: bool, rows: list[dict[str, Any]], preset_of: str | None, interrupted: bool
) -> dict[str, Any]:
    clauses = [row for row in rows if capability in row["needs" if declared else "refuses"]]
    outcomes = Counter(row["outcome"] for row in clauses if row["outcome"] not in ("does not apply", "skipped"))
    good, bad = ("works", "does not work") if declared else ("refused", "not refused")
    if outcomes["failed"]:
        result = bad
    elif outcomes["failed as expected"]:
        result = f"{bad}, as expected"
    elif not outcomes["passed"]:
        result = "not shown" if preset_of is None else f"see {preset_of}"
    else:
        result = f"{good}, as far as run" if outcomes["not run"] or interrupted else good
    return {"name": str(capability), "declared": declared, "result": result, "clauses": outcomes.total()}


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text: str = crash.message if crash is not None else report.longreprtext
    return text if len(text) <= 4000 else f"{text[:2000]}\n…\n{text[-2000:]}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
