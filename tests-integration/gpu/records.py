"""What a part of the run finds, written line by line, so that a part that is ended early leaves what it has found."""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["RECORDS", "Records", "read_records"]

#: The file of all parts in the folder of a run.
RECORDS = "records.jsonl"


class Records:
    """Appends checks and figures to a file of JSON lines, to which several processes may append.

    A line is either a check, ``{"part": ..., "check": ..., "outcome": ..., "seconds": ...}``, or a figure,
    ``{"part": ..., "figure": ..., "value": ..., "bar": ..., "met": ...}``. Both have details. The outcome is
    ``"passed"``, ``"failed"``, ``"left out"`` or ``"no time"``.

    Args:
        path: The file, which is continued if it exists.
        part: The part of the run that measures.
        judges: Whether figures are held against their bars. A rehearsal's are not: it measures tiny sizes on a CPU.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "sums.jsonl"
        >>> records = Records(path, "sums")
        >>> with records.check("one plus one") as details:
        ...     details["sum"] = 1 + 1
        passed  sums: one plus one
        >>> records.figure("seconds of a sum", 0.25, at_most=1.0)
        figure  seconds of a sum: 0.25 (≤ 1: met)
        >>> [line.get("sum") or line["met"] for line in read_records(path)]
        [2, True]
    """

    def __init__(self, path: Path, part: str, *, judges: bool = True) -> None:
        self._path, self._part, self._judges = path, part, judges
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """A context that records whether its body raised. An exception is recorded and printed, and goes no further.

        Args:
            name: What is checked.

        Yields:
            Details of the line, which the body may fill.
        """
        details: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            yield details
        except Exception as error:
            details |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        outcome = "failed" if "error" in details else "passed"
        self.outcome(name, outcome, seconds=time.perf_counter() - began, **details)

    def outcome(self, name: str, outcome: str, **details: Any) -> None:
        """Record a check that was made elsewhere, or that is left out, which ``details`` then explain.

        Args:
            name: What is checked.
            outcome: ``"passed"``, ``"failed"``, ``"left out"`` or ``"no time"``.
            **details: What else the line says, such as ``reason``.
        """
        self._append({"check": name, "outcome": outcome, **details})
        reason = details.get("traceback") or details.get("reason")
        _show(f"{outcome}  {self._part}: {name}" + (f"\n{reason}" if reason else ""))

    def no_time(self, name: str, reason: str = "the time was up") -> None:
        """Record a check that was not made because the time was up.

        Args:
            name: What would have been checked.
            reason: How much time was left.
        """
        self.outcome(name, "no time", reason=reason)

    def figure(
        self,
        name: str,
        value: float | None,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        **details: Any,
    ) -> None:
        """Record a measured figure.

        Args:
            name: What was measured, with its unit.
            value: The figure; ``None`` if it can't be measured on this device, which ``details`` then explain.
            at_most: The figure's bar, if it must not be larger.
            at_least: The figure's bar, if it must not be smaller.
            **details: What else the line says.
        """
        bar = f"≤ {at_most:g}" if at_most is not None else f"≥ {at_least:g}" if at_least is not None else None
        met = None
        if value is not None and not math.isfinite(value):
            met = False
        elif value is not None and bar is not None and self._judges:
            met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self._append({"figure": name, "value": value, "bar": bar, "met": met, **details})
        measured = "not measured" if value is None else f"{value:.4g}"
        verdict = "" if bar is None else f" ({bar}" + ("" if met is None else f": {'met' if met else 'NOT MET'}") + ")"
        _show(f"figure  {name}: {measured}{verdict}")

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps({"part": self._part, **line}, default=str) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(text.encode())  # in one piece, so that lines of several processes don't mix


def _show(text: str) -> None:
    """Print, also where nobody reads any more: what counts is in the file."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file.

    A last line that was cut off by a kill is left out. Any other that can't be read is a failed check of its own.
    """
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(dict(json.loads(line)))
        except ValueError:
            unreadable = f"line {number} can't be read: {line[:80]!r}"
            records.append({"part": "records", "check": unreadable, "outcome": "failed", "reason": "it was cut off"})
    return records
