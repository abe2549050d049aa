"""The command ``fsdp``. Each group of commands has its own file, imported when one of its commands is used."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import click

from fsdp_core.cli.lazy_group import LazyGroup

__all__ = ["checkpoint", "fsdp", "main"]

# Command: (its location, its line in `fsdp --help`), so that help and commands need no other command's imports.
_COMMANDS = {
    "list": ("fsdp_core.cli.strategies:list_strategies", "Show the strategies, and which can run here."),
    "describe": ("fsdp_core.cli.strategies:describe_strategy", "Show what a strategy can do, and its options."),
    "plan": ("fsdp_core.cli.plan:plan", "Show what a training script needs under each strategy, before it runs."),
    "prove": ("fsdp_core.cli.prove:prove", "Show whether a training script trains on ranks as in one process."),
    "rehearse": ("fsdp_core.cli.rehearse:rehearse", "Show what one rank of many does, before any is started."),
    "doctor": ("fsdp_core.cli.doctor:doctor", "Look for what is broken here, for you and for bug reports."),
    "new-backend": ("fsdp_core.cli.new_backend:new_backend", "Write the skeleton of a package with a backend."),
    "checkpoint": ("fsdp_core.cli:checkpoint", "Look into checkpoints, compare and convert them."),
}

_CHECKPOINT_COMMANDS = {
    "list": (
        "fsdp_core.cli.checkpoint_reading:list_checkpoints",
        "Show the checkpoints in a directory, complete or not.",
    ),
    "inspect": ("fsdp_core.cli.checkpoint_reading:inspect_checkpoint", "Show what is in a checkpoint."),
    "verify": ("fsdp_core.cli.checkpoint_reading:verify_checkpoint", "Compare every byte with the manifest."),
    "diff": ("fsdp_core.cli.checkpoint_reading:diff_checkpoints", "Show what differs between two checkpoints."),
    "consolidate": (
        "fsdp_core.cli.checkpoint_writing:consolidate_checkpoint",
        "Write a checkpoint as a file or folder that other libraries read.",
    ),
    "import": (
        "fsdp_core.cli.checkpoint_import:import_checkpoint",
        "Make a checkpoint of this format from another library's.",
    ),
    "gather": (
        "fsdp_core.cli.checkpoint_writing:gather_checkpoint",
        "Join the places of a save that hosts without a shared disk have written.",
    ),
    "reshard": (
        "fsdp_core.cli.checkpoint_writing:reshard_checkpoint",
        "Write a checkpoint again, in another number of files.",
    ),
}


@click.command(cls=LazyGroup, commands_at=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fsdp-core", prog_name="fsdp", message="%(prog)s (fsdp-core) %(version)s")
def fsdp() -> None:
    """Sharded training by name: which strategies there are, what they can do, and tools for their checkpoints."""


@click.command("checkpoint", cls=LazyGroup, commands_at=_CHECKPOINT_COMMANDS)
def checkpoint() -> None:
    """Look into checkpoints of this format, compare and convert them.

    PATH may be a local folder or any fsspec URL, such as s3://bucket/run1.ckpt. Each command exits with status 0, with
    1 for a reported error, damage or difference, and with 2 for wrong usage.
    """


def main() -> None:
    """Run the command with the process's arguments. Exit status: 0, 1 for a reported error, 2 for wrong usage."""
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
    """Reserve stdout for the output of commands: what a plugin's libraries write to file descriptor 1 goes to stderr.

    Python's prints while a plugin is loaded go there too, by :func:`fsdp_core.plugins.side_effects.watched`.
    """
    stdout = sys.stdout
    if not isinstance(stdout, TextIOWrapper) or stdout is not sys.__stdout__ or sys.stderr is None:
        return
    try:
        number = stdout.fileno()
        fallback = sys.stderr.fileno()
        duplicate = os.dup(number)
        os.dup2(fallback, number)
    except OSError:  # no file behind it
        return
    binary = os.fdopen(duplicate, "wb")
    sys.stdout = TextIOWrapper(binary, stdout.encoding, "replace", line_buffering=stdout.line_buffering)


def _leave(status: object) -> None:
    """Exit at once if a plugin left threads or exit handlers, which could change the status or block the exit."""
    side_effects = sys.modules.get("fsdp_core.plugins.side_effects")
    if side_effects is None or not side_effects.lasting():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
