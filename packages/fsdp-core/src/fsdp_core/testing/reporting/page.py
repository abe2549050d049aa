"""The report of a conformance run as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6577; --line: #dfe3ea; --paper: #fff; --card: #f7f8fa;
  --good: #13733a; --good-on: #e2f5e9; --bad: #b3201b; --bad-on: #fde7e5; --warn: #8a5a00; --warn-on: #fdf1d8;
  --dim: #5b6577; --dim-on: #eceff3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #313946; --paper: #14181f;
  --card: #1b212a; --good: #6fdc97; --good-on: #143423; --bad: #ff938c; --bad-on: #431b19; --warn: #f2c266;
  --warn-on: #3d2e10; --dim: #9aa4b5; --dim-on: #272e39; } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .88em }
p, .soft { color: var(--soft); margin: .2rem 0 }
article { border-top: 1px solid var(--line); padding-top: 1.8rem; margin-top: 2.2rem }
.head { display: flex; align-items: baseline; gap: .8rem; flex-wrap: wrap }
.chip { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .82rem; font-weight: 600;
  white-space: nowrap; color: var(--dim); background: var(--dim-on) }
.good { color: var(--good); background: var(--good-on) } .bad { color: var(--bad); background: var(--bad-on) }
.warn { color: var(--warn); background: var(--warn-on) }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; margin: .8rem 0 0; padding: 0 }
.facts div { display: flex; gap: .45rem; white-space: nowrap } .facts dt { color: var(--soft) }
.facts dd { margin: 0 }
table { border-collapse: collapse; width: 100% }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .82rem }
th, td { padding: .32rem .7rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; padding-right: 0 }
td.state { width: 1%; white-space: nowrap }
td .mono { overflow-wrap: anywhere }
details { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0;
  padding: .45rem .9rem } summary { cursor: pointer; display: flex; gap: .8rem; align-items: baseline }
summary b { flex: 1 } details table { margin: .4rem 0 } details tr:last-child td { border-bottom: 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 0; font-size: .8rem; color: var(--soft) }
"""

_KINDS = {
    "passed": "good",
    "works": "good",
    "refused": "good",
    "failed": "bad",
    "does not work": "bad",
    "not refused": "bad",
    "does not apply": "",
    "skipped": "",
}


def page(found: Mapping[str, Any]) -> str:
    """Render the report as HTML.

    Args:
        found: The report as plain data, the content of the JSON file.

    Returns:
        The page.
    """
    versions = [(name, value) for name, value in found["versions"].items() if value]
    suites = "".join(_suite(one) for one in found["suites"]) or "<p>No clause of the suite was collected.</p>"
    names = ", ".join(dict.fromkeys(one["strategy"] for one in found["suites"]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Conformance of {escape(names or 'nothing')}</title><style>{_STYLE}</style></head><body>"
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
            f'<tr><td><span class="mono">{escape(one["name"])}</span></td><td>{"yes" if one["declared"] else "no"}</td>'
            f'<td>{_chip(one["result"])}</td><td class="number">{one["clauses"]}</td></tr>'
            for one in suite["capabilities"]
        )
        + "</table><h2>Clauses</h2>"
        + "".join(_subject(name, rows) for name, rows in sorted(subjects.items()))
        + "</article>"
    )


def _subject(name: str, rows: list[Mapping[str, Any]]) -> str:
    order = ["failed", "not run", "failed as expected", "skipped", "does not apply", "passed"]
    outcomes = {row["outcome"] for row in rows}
    chips = "".join(
        _chip(one, f"{sum(row['outcome'] == one for row in rows)} {one}") for one in order if one in outcomes
    )
    seconds = sum(row["seconds"] for row in rows)
    opened = " open" if "failed" in outcomes else ""
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


def _chip(kind: str, text: str | None = None) -> str:
    colour = "" if kind.startswith("see ") else _KINDS.get(kind, "warn")
    return f'<span class="chip {colour}">{escape(text or kind)}</span>'


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
