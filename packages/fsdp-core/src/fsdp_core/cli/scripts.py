"""What commands share that run a user's training script up to its fit."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import click

from fsdp_core.errors import StrategyUnavailableError

__all__ = ["script_command", "script_output_on_stderr"]

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--fits", type=click.IntRange(1), default=1, show_default=True, help="How many calls of fit() to reach."
    ),
    click.option("--patience", default=60.0, show_default=True, help="Seconds that the first batches may take."),
    click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs to read."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
    click.pass_context,
)


def script_command(name: str, *options: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function: ``fsdp NAME [OPTIONS] SCRIPT [ARGUMENTS]``.

    Args:
        name: The command's name.
        *options: The command's own options. All such commands have some, which the function takes too: ``fits``,
            ``patience``, ``as_module``, ``as_json``, ``script`` and ``arguments``.
    """

    def make(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            _check_libraries(name)
            function(*args, **kwargs)

        decorated: Any = run
        for decorate in reversed((*options, *_OPTIONS)):
            decorated = decorate(decorated)
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        return click.command(name, context_settings=settings)(decorated)

    return make


def _check_libraries(command: str) -> None:
    """Refuse to run a script where torch or Lightning is not installed, both of which come with a backend."""
    missing = [library for library in ("torch", "lightning") if find_spec(library) is None]
    if missing:
        raise StrategyUnavailableError(
            f"fsdp {command} runs a training script, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here.\n"
            "Type: python -m pip install fsdp-fsdp2, which brings both."
        )


@contextmanager
def script_output_on_stderr() -> Iterator[None]:
    """A context in which what a user's script prints is no part of the command's output."""
    stdout = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
