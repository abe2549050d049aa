"""How pytest collects the suite's clauses: which run, which are expected to fail; none may be left out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import StrategyInfo
from fsdp_core.testing.launching.process_ranks import RankKind

if TYPE_CHECKING:
    from fsdp_core.testing.suite.base_class import Clauses

__all__ = ["CLAUSE", "choose_clauses", "clauses_of", "refuse_skipped"]

#: The description of a clause for the report, on its pytest item.
CLAUSE = pytest.StashKey[dict[str, Any]]()

#: The kit's folder. Code in it may skip a clause; other code may not.
_KIT = str(Path(__file__).parent.parent)


def clauses_of(cls: object) -> type[Clauses] | None:
    """The class, if it runs clauses; does not import the suite, which most pytest sessions don't need."""
    module = sys.modules.get("fsdp_core.testing.suite.base_class")
    if module is None or not isinstance(cls, type) or not issubclass(cls, module.Clauses):
        return None
    return cls


def choose_clauses(cls: type[Clauses], items: list[Any]) -> list[Any]:
    """Select from the tests that pytest has collected in a class, and mark the expected failures.

    Args:
        cls: Clauses for one strategy.
        items: Its tests, one for each set of parameters.

    Returns:
        The tests that apply to the strategy, in the order of the suite's bases, so that with ``pytest -x`` the first
        failure is what to write next. A clause for an undeclared capability is kept, skipped with the reason.

    Raises:
        pytest.Collector.CollectError: The class was tampered with, or expects a failure of something that is no clause.
    """
    name = cls.__name__
    if not isinstance(getattr(cls, "strategy", None), str):
        raise pytest.Collector.CollectError(f'{name} names no strategy.\nWrite strategy = "yours" in it.')
    if changed := cls.changed():
        raise pytest.Collector.CollectError(
            f"{name} would not run the suite as it is written: {', '.join(changed)} was replaced or marked.\n"
            "A clause that is known to fail is named in expected_failures, with the reason."
        )
    info = registry.describe(cls.strategy)
    names = set(cls.clauses())
    applicable = [item for item in items if item.originalname not in names or _applies(item, info)]
    # In the order of the bases; pytest itself begins with the last one.
    applicable.sort(key=lambda item: next(i for i, base in enumerate(cls.__mro__) if item.originalname in vars(base)))
    clauses = [item for item in applicable if item.originalname in names]
    skip_reasons = {item: _skip_reason(item, info, cls.rank_pool.kind) for item in clauses}
    _check_expected(cls, [item for item in clauses if not skip_reasons[item]])
    for item in clauses:
        needs = [str(need) for need in _needs(item)]
        refuses = [str(mark.args[0]) for mark in item.iter_markers("fsdp_undeclared")]
        expected = cls.expected_failures.get(item.name, cls.expected_failures.get(item.originalname))
        item.extra_keyword_matches.add(item.function.__module__.rpartition(".")[2])
        item.stash[CLAUSE] = {
            "test": item.nodeid,
            "suite": item.parent.nodeid,
            "strategy": cls.strategy,
            "preset_of": cls.preset_of,
            "ranks": cls.rank_pool.kind,
            "subject": item.function.__module__.rpartition(".")[2],
            "clause": item.name,
            "needs": needs,
            "refuses": refuses,
            "expected_failure": expected,
            "does_not_apply": skip_reasons[item],
        }
        if skip_reasons[item]:
            item.add_marker(pytest.mark.skip(reason=skip_reasons[item]))
        elif expected is not None:
            item.add_marker(pytest.mark.xfail(reason=expected, strict=True), append=False)
    return applicable


def refuse_skipped(item: pytest.Item, report: pytest.TestReport) -> None:
    """Fail a clause that something other than the suite has skipped or marked as an expected failure.

    Args:
        item: A test; most are not from the suite.
        report: pytest's report of it; changed in place.
    """
    clause = item.stash.get(CLAUSE, None)
    if clause is None or not report.skipped:
        return
    xfail_reason = getattr(report, "wasxfail", None)
    if xfail_reason is not None:
        is_allowed = clause["expected_failure"] is not None
        reason = xfail_reason
    else:
        path, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        reason = reason.removeprefix("Skipped: ")
        is_allowed = bool(clause["does_not_apply"]) or _skips_itself(item, str(path), reason)
    if not is_allowed:
        if xfail_reason is not None:
            del report.wasxfail
        report.outcome = "failed"
        report.longrepr = (
            f"{clause['clause']} is a clause of the conformance suite, and was left out: {reason}\n"
            "A clause that is known to fail is named in expected_failures, with the reason. "
            "To leave clauses out of one run, choose with -k or --deselect: the report shows them as not run."
        )


def _skips_itself(item: Any, path: str, reason: str) -> bool:
    """Whether the suite itself has skipped a clause, because something that it needs is missing on this machine."""
    own_marks = [mark for mark in getattr(item.function, "pytestmark", ()) if mark.name in ("skip", "skipif")]
    all_marks = [mark for mark in item.iter_markers() if mark.name in ("skip", "skipif")]
    if all_marks:
        return all(any(mark is own_mark for own_mark in own_marks) for mark in all_marks)
    return path.startswith(_KIT)


def _needs(item: Any) -> list[Any]:
    return [need for mark in item.iter_markers("fsdp_requires") for need in mark.args]


def _applies(item: Any, info: StrategyInfo) -> bool:
    return not any(mark.args[0] in info.capabilities for mark in item.iter_markers("fsdp_undeclared"))


def _skip_reason(item: Any, info: StrategyInfo, kind: RankKind) -> str:
    """Return why a clause does not apply to a strategy; an empty string if it does."""
    for mark in item.iter_markers("fsdp_ranks"):
        if kind not in mark.args:
            return f"about ranks that are {' or '.join(mark.args)}, and those of {info.name!r} are {kind} here"
    options = {option.name for option in info.options}
    needs = _needs(item)
    undeclared = [str(need) for need in needs if isinstance(need, Capability) and need not in info.capabilities]
    missing = [need for need in needs if not isinstance(need, Capability) and need not in options]
    reasons = []
    if undeclared:
        reasons.append(f"does not declare {', '.join(undeclared)}")
    if missing:
        reasons.append(f"has no option {', '.join(missing)}")
    return f"{info.name!r} {' and '.join(reasons)}" if reasons else ""


def _check_expected(cls: type[Clauses], items: list[Any]) -> None:
    names = {name for item in items for name in (item.name, item.originalname)}
    for name, reason in cls.expected_failures.items():
        if name not in names:
            likeness, nearest = registry.likeness(name, sorted(names))
            raise pytest.Collector.CollectError(
                f"{cls.__name__} expects {name!r} to fail, which is no clause that runs for {cls.strategy!r}."
                + (f" Did you mean {nearest!r}?" if likeness >= registry.CUTOFF else "")
                + "\nName clauses as `pytest --collect-only` does, with or without the parameters in brackets."
            )
        if not (isinstance(reason, str) and reason.strip()):
            raise pytest.Collector.CollectError(
                f"{cls.__name__} expects {name!r} to fail and does not say why.\n"
                f'Write expected_failures = {{{name!r}: "why, and what is to be done about it"}}.'
            )
