"""A group of commands, each imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from fsdp_core.cli.output import clean
from fsdp_core.errors import FSDPError

__all__ = ["LazyGroup"]


class _Refusal(click.ClickException):
    """One of our errors as the command reports it: only the message, on stderr, with exit status 1."""

    def show(self, file: Any = None) -> None:
        click.echo("\n".join(map(clean, self.message.split("\n"))), err=True)


class LazyGroup(click.Group):
    """Commands by name; listing them, or using one, does not import the others.

    Args:
        commands_at: For each command its location, ``"module:attribute"``, and its line in the group's help.
        **options: As for :class:`click.Group`.
    """

    def __init__(self, *, commands_at: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self.commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_at:
            return None
        module, _, attribute = self.commands_at[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.commands_at.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FSDPError as error:
            raise _Refusal(str(error)) from error
