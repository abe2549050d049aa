"""The command ``fsdp``. Each group of commands has a file of its own, imported when a command of it is used."""

from __future__ import annotations

import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from fsdp_core.errors import FSDPError

__all__ = ["fsdp", "main"]

# Command: (where it is, what `fsdp --help` says of it), so that neither needs the others' imports.
_COMMANDS = {
    "list": ("fsdp_core.cli.strategies:list_strategies", "Show the strategies, and which can run here."),
    "describe": ("fsdp_core.cli.strategies:describe_strategy", "Show what a strategy can do, and its options."),
}


class _Refusal(click.ClickException):
    """One of our errors, as the command shows it: the message alone, on stderr, and exit status 1."""

    def show(self, file: Any = None) -> None:
        click.echo(self.message, err=True)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FSDPError as error:
            raise _Refusal(str(error)) from error


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fsdp-core", prog_name="fsdp", message="%(prog)s (fsdp-core) %(version)s")
def fsdp() -> None:
    """Sharded training by name: which strategies there are, and what they can do."""


def main() -> None:
    """Run the command with the process' arguments. Exit status: 0, 1 for an error that we name, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # '→' on a terminal that can't show it
    fsdp(prog_name="fsdp")
