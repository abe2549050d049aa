"""The output of commands: tables, sizes, progress; plain text where there is no terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from fsdp_core.errors import printable

_MAX_ALIGNED = 200  # a longer cell does not widen its column

__all__ = [
    "clean",
    "format_age",
    "format_count",
    "format_size",
    "print_json",
    "print_table",
    "progress",
]


def print_table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int = 120, right: Sequence[int] = ()
) -> None:
    """Print columns, the last one folded to the variable ``COLUMNS`` or the terminal's width, otherwise to ``width``.

    Control characters are escaped.

    Without rich, because importing its tables takes a quarter of the time that ``fsdp list`` may take.

    Args:
        header: The columns' titles, or nothing.
        rows: The cells.
        width: The maximum width where there is neither the variable nor a terminal.
        right: The columns to align to the right, by index; not the last.
    """
    rows_with_header = [header, *rows] if header else rows
    lines = [tuple(map(clean, cells)) for cells in rows_with_header]
    columns = [[len(cell) for cell in column if len(cell) <= _MAX_ALIGNED] for column in zip(*lines, strict=True)]
    widths = [max(lengths, default=0) for lengths in columns][:-1]
    indent = sum(widths) + 2 * len(widths)
    width = _line_width() or width
    for number, (*cells, last) in enumerate(lines):
        start = "".join(
            (cell.rjust(column_width) if column in right else cell.ljust(column_width)) + "  "
            for column, (cell, column_width) in enumerate(zip(cells, widths, strict=True))
        )
        folded = _fold(last, max(30, width - indent))
        text = f"\n{' ' * indent}".join(folded)
        line = (start + text).rstrip()
        click.echo(click.style(line, bold=True) if header and number == 0 else line)


def _fold(text: str, width: int) -> list[str]:
    """The lines of a text. Unlike ``textwrap``, it takes time in proportion to the length of a word.

    Example:
        >>> _fold("in lines of ten charactersisthisone", 10)
        ['in lines', 'of ten cha', 'ractersist', 'hisone']
    """
    lines = []
    line = ""
    for number, word in enumerate(text.split(" ")):
        room = width - len(line) - 1  # for a part of the word, after a space
        if number and len(word) <= room:
            line = f"{line} {word}"
            continue
        if line and len(word) > width and room > 0:  # it does not fit any line: begin it in this one
            line = f"{line} {word[:room]}"
            word = word[room:]
        lines.append(line)
        pieces = [word[start : start + width] for start in range(0, len(word), width)] or [""]
        lines += pieces[:-1]
        line = pieces[-1]
    return [text_line for text_line in (line.rstrip() for line in [*lines, line]) if text_line] or [""]


def _line_width() -> int | None:
    """The width that the variable ``COLUMNS`` or the terminal gives; ``None`` where there is neither."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    if columns > 0:
        return columns
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, or no file at all
        return None


def print_json(value: Any) -> None:
    """Print JSON; numbers that JSON lacks, such as NaN, must have been converted to strings before."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def clean(text: object) -> str:
    """Convert a value from a file to text without control characters."""
    return printable(str(text))


def format_size(number: int) -> str:
    """Format a number of bytes, in powers of 1000.

    Example:
        >>> format_size(999), format_size(1_234_567), format_size(999_999)
        ('999 B', '1.2 MB', '1.0 MB')
    """
    return _scale(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(number: int) -> str:
    """Format a count.

    Example:
        >>> format_count(999), format_count(124_439_808)
        ('999', '124.4 M')
    """
    return _scale(number, ("", "k", "M", "G", "T", "P")).rstrip()


def format_age(seconds: float) -> str:
    """Format an age in seconds.

    Example:
        >>> format_age(59), format_age(7_300), format_age(200_000)
        ('59 s', '2 h', '2 days')
    """
    for length, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit if seconds >= 2 * length or unit != 'days' else 'day'}"
    return f"{max(seconds, 0):.0f} s"


def _scale(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < (1000 if unit == units[0] else 999.95):
            return f"{number} {unit}" if unit == units[0] else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} {units[-1]}"


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr while the block runs, if that is a terminal.

    Yields:
        A function to call with the bytes done and the total bytes; ``None`` where nothing is shown.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, width=30) as bar:
        before = 0

        def show(done: int, total: int) -> None:
            nonlocal before
            bar.length = max(total, 1)
            bar.update(done - before)
            before = done

        yield show
