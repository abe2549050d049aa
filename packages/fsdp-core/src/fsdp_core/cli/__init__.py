"""The command ``fsdp``. Each group of commands has a file of its own, imported when a command of it is used."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from fsdp_core.cli.lazy_group import LazyGroup

__all__ = ["fsdp", "main"]

# Command: (where it is, what `fsdp --help` says of it), so that neither needs the others' imports.
_COMMANDS = {
    "list": ("fsdp_core.cli.strategies:list_strategies", "Show the strategies, and which can run here."),
    "describe": ("fsdp_core.cli.strategies:describe_strategy", "Show what a strategy can do, and its options."),
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
    fsdp(prog_name="fsdp")
