"""Reading a checkpoint of either kind on all ranks: all get it, or all raise the same."""

from __future__ import annotations

from typing import Any

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.collective import together
from fsdp_core.lightning.capabilities import check_checkpoint
from fsdp_core.lightning.checkpoints.full_file import read_full_file
from fsdp_core.runtime import Runtime

__all__ = ["read_checkpoint"]


def read_checkpoint(strategy: str, path: str, weights_only: bool | None, runtime: Runtime) -> tuple[Any, bool]:
    """Read a sharded folder or a full file; which of the two is seen from what is there. All ranks must call it.

    Args:
        strategy: The strategy's name, whose plugin says which of the two it takes.
        path: A local path or an fsspec URL, the same on all ranks.
        weights_only: ``False`` lets a full file execute code.
        runtime: The ranks. They divide the verification of a folder between them.

    Returns:
        What was saved (tensors of a folder are still in its files), and whether it is a folder.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
        CheckpointFormatError: Some rank finds no checkpoint there that can be read, or a part of it that is damaged.
    """
    # a host that lacks the path must not look for a file there while the others read a folder together
    sharded = any(together(runtime, f"looking for {path}", lambda: checkpoints.is_folder(path)))
    check_checkpoint(strategy, "sharded" if sharded else "full", f"to load {path!r}")
    if sharded:
        return checkpoints.load(path, runtime=runtime), True
    found: list[Any] = []
    together(runtime, f"reading {path}", lambda: found.append(read_full_file(path, weights_only)))
    return found[0], False
