"""The group ``fsdp checkpoint``."""

from __future__ import annotations

import click

from fsdp_core.cli.lazy_group import LazyGroup

__all__ = ["checkpoint"]

_COMMANDS = {
    "list": ("fsdp_core.cli.checkpoint_reading:list_checkpoints", "Show what lies in a directory, whole or not."),
    "inspect": ("fsdp_core.cli.checkpoint_reading:inspect_checkpoint", "Show what is in a checkpoint."),
    "verify": ("fsdp_core.cli.checkpoint_reading:verify_checkpoint", "Compare every byte with the manifest."),
    "diff": ("fsdp_core.cli.checkpoint_reading:diff_checkpoints", "Show what differs between two checkpoints."),
    "consolidate": (
        "fsdp_core.cli.checkpoint_writing:consolidate_checkpoint",
        "Write it as a file or folder that others read.",
    ),
    "import": (
        "fsdp_core.cli.checkpoint_import:import_checkpoint",
        "Make a checkpoint of this format from another library's.",
    ),
    "reshard": ("fsdp_core.cli.checkpoint_writing:reshard_checkpoint", "Write it in another number of files."),
}


@click.command("checkpoint", cls=LazyGroup, commands_at=_COMMANDS)
def checkpoint() -> None:
    """Look into checkpoints of this format, compare and convert them.

    PATH may be a local folder or any fsspec URL, such as s3://bucket/run1.ckpt. Each command answers with exit status
    0, with 1 for an error, damage or a difference that it names, and with 2 for wrong usage.
    """
