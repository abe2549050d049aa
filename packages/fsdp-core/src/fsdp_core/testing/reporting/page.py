"""The report of a conformance run as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["page"]

_STYLE = Path(__file__).with_name("page.css")

_COLOURS = {
    "passed": "good",
    "works": "good",
    "refused": "good",
    "failed": "bad",
    "does not work": "bad",
    "not refused": "bad",
    "does not apply": "",
    "skipped": "",
}


def page(report: Mapping[str, Any]) -> str:
    """Render the report as HTML.

    Args:
        report: The report as plain data, the content of the JSON file.

    Returns:
        The page.
    """
    versions = [(name, value) for name, value in report["versions"].items() if value]
    suites = "".join(_suite(suite) for suite in report["suites"]) or "<p>No clause of the suite was collected.</p>"
    names = ", ".join(dict.fromkeys(suite["strategy"] for suite in report["suites"]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Conformance of {escape(names or 'nothing')}</title>"
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head><body>"
        "<h1>Conformance of sharded strategies</h1>"
        "<p>The capabilities that each strategy declares, and the results of its conformance suite.</p>"
        f"{_facts(versions)}{suites}</body></html>\n"
    )


def _suite(suite: Mapping[str, Any]) -> str:
    counts = [(outcome, str(count)) for outcome, count in sorted(suite["totals"].items())]
    facts = [("package", suite["package"]), ("run as", suite["suite"]), *counts, ("took", _time(suite["seconds"]))]
    subjects: dict[str, list[Mapping[str, Any]]] = {}
    for row in suite["clauses"]:
        subjects.setdefault(row["subject"], []).append(row)
    return (
        f'<article><div class="head"><h1><code>{escape(suite["strategy"])}</code></h1>{_chip(suite["verdict"])}</div>'
        f"<p>{escape(suite['summary'])}</p>{_facts(facts)}"
        "<h2>Capabilities</h2><table><tr><th>capability</th><th>declared</th><th>result</th>"
        '<th class="number">clauses</th></tr>'
        + "".join(
            f'<tr><td><span class="mono">{escape(row["name"])}</span></td><td>{"yes" if row["declared"] else "no"}</td>'
            f'<td>{_chip(row["result"])}</td><td class="number">{row["clauses"]}</td></tr>'
            for row in suite["capabilities"]
        )
        + "</table><h2>Clauses</h2>"
        + "".join(_subject(name, rows) for name, rows in sorted(subjects.items()))
        + "</article>"
    )


def _subject(name: str, rows: list[Mapping[str, Any]]) -> str:
    order = ["failed", "not run", "failed as expected", "skipped", "does not apply", "passed"]
    counts = Counter(row["outcome"] for row in rows)
    chips = "".join(_chip(outcome, f"{counts[outcome]} {outcome}") for outcome in order if outcome in counts)
    seconds = sum(row["seconds"] for row in rows)
    opened = " open" if "failed" in counts else ""
    return (
        f"<details{opened}><summary><b>{escape(name.replace('_', ' '))}</b>{chips}"
        f'<span class="soft">{_time(seconds)}</span></summary><table>'
        + "".join(
            f'<tr><td class="state">{_chip(row["outcome"])}</td>'
            f'<td><span class="mono">{escape(row["clause"])}</span>{_reason(row["reason"])}</td>'
            f'<td class="number soft">{row["seconds"]:.2f} s</td></tr>'
            for row in rows
        )
        + "</table></details>"
    )


def _reason(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
        + "</dl>"
    )


def _chip(result: str, text: str | None = None) -> str:
    is_reference = result.startswith("see ")  # to another run of the suite, which tried it
    colour = "" if is_reference else _COLOURS.get(result, "warn")
    return f'<span class="chip {colour}">{escape(text or result)}</span>'


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
