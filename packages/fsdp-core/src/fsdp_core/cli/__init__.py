"""The command ``fsdp``. Each group of commands has a file of its own, imported when a command of it is used."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import click

from fsdp_core.cli.lazy_group import LazyGroup

__all__ = ["fsdp", "main"]

# Command: (where it is, what `fsdp --help` says of it), so that neither needs the others' imports.
_COMMANDS = {
    "list": ("fsdp_core.cli.strategies:list_strategies", "Show the strategies, and which can run here."),
    "describe": ("fsdp_core.cli.strategies:describe_strategy", "Show what a strategy can do, and its options."),
    "doctor": ("fsdp_core.cli.doctor:doctor", "Look for what is broken here, for you and for bug reports."),
    "new-backend": ("fsdp_core.cli.new_backend:new_backend", "Write the skeleton of a package with a backend."),
    "checkpoint": ("fsdp_core.cli.checkpoint:checkpoint", "Look into checkpoints, compare and convert them."),
}


@click.command(cls=LazyGroup, commands_at=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fsdp-core", prog_name="fsdp", message="%(prog)s (fsdp-core) %(version)s")
def fsdp() -> None:
    """Sharded training by name: which strategies there are, what they can do, and tools for their checkpoints."""


def main() -> None:
    """Run the command with the process' arguments. Exit status: 0, 1 for an error that we name, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # '→' on a terminal that can't show it
    _keep_stdout()
    try:
        fsdp(prog_name="fsdp")
    except SystemExit as ending:
        _leave(ending.code)
        raise


def _keep_stdout() -> None:
    """Keep stdout for what commands print: what a plugin's libraries write there by themselves goes to stderr.

    Python's own prints while a plugin is loaded do so too, by :func:`fsdp_core.plugins.side_effects.watched`.
    """
    ours = sys.stdout
    if not isinstance(ours, TextIOWrapper) or ours is not sys.__stdout__ or sys.stderr is None:
        return
    try:
        number, fallback = ours.fileno(), sys.stderr.fileno()
        kept = os.dup(number)
        os.dup2(fallback, number)
    except OSError:  # no file behind it
        return
    binary = os.fdopen(kept, "wb")
    sys.stdout = TextIOWrapper(binary, ours.encoding, "replace", line_buffering=ours.line_buffering)


def _leave(status: object) -> None:
    """End the process at once if a plugin left threads or exit handlers, which could change its status, or keep it."""
    found = sys.modules.get("fsdp_core.plugins.side_effects")
    if found is None or not found.lasting():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
