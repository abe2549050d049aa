"""Saving and reading a checkpoint of either kind: a sharded folder, or a full file. What both front ends do alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from lightning.fabric.plugins import CheckpointIO

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.collective import together
from fsdp_core.lightning.capabilities import check_checkpoint
from fsdp_core.lightning.checkpoints.full.file import read_full_file, write_full
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.backend import Backend

__all__ = ["SavingStrategy", "read_checkpoint", "write_file", "write_folder"]


class SavingStrategy(Protocol):
    """What saving and loading ask of a strategy, under both front ends."""

    backend: Backend
    runtime: Runtime
    strategy_name: str

    @property
    def state_dict_type(self) -> str:
        """``"sharded"`` for a folder, ``"full"`` for one file."""
        ...

    @property
    def sequential_save(self) -> bool:
        """Whether ranks of a host write their part of a folder one after another."""
        ...

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes a full file."""
        ...

    def refuse_storage_options(self, storage_options: Any) -> None:
        """Refuse options for a ``CheckpointIO`` where none writes."""
        ...


def write_file(
    strategy: SavingStrategy,
    path: str,
    whole: dict[str, Any],
    live: Any,
    storage_options: Any,
    async_saves: AsyncSaves | None,
) -> None:
    """Write what was gathered as a full file. All ranks must call it.

    Args:
        strategy: Whose ``CheckpointIO`` writes it.
        path: The file.
        whole: What was gathered, on rank 0.
        live: What it was gathered from.
        storage_options: For the ``CheckpointIO``.
        async_saves: What writes in the background; ``None`` to write now.
    """
    write_full(
        path,
        whole,
        live,
        write=lambda it: strategy.checkpoint_io.save_checkpoint(it, path, storage_options=storage_options),
        runtime=strategy.runtime,
        async_saves=async_saves,
    )


def write_folder(
    strategy: SavingStrategy,
    path: str,
    state: dict[str, Any],
    storage_options: Any,
    async_saves: AsyncSaves | None,
    *,
    kinds: Mapping[str, str],
    aliases: Mapping[str, str],
) -> None:
    """Write each rank's part of a sharded folder. All ranks must call it.

    Args:
        strategy: Whose checkpoint it is.
        path: The folder.
        state: What this rank holds.
        storage_options: Refused: no ``CheckpointIO`` writes folders.
        async_saves: What writes in the background; ``None`` to write now.
        kinds: By path in the state, ``"model"`` or ``"optimizer"``.
        aliases: The further names of tied parameters, by path in the state.
    """
    strategy.refuse_storage_options(storage_options)
    in_order = partial(checkpoints.save, runtime=strategy.runtime, one_after_another=strategy.sequential_save)
    save = in_order if async_saves is None else async_saves.save
    save(path, state, strategy=strategy.strategy_name, kinds=kinds, aliases=aliases)


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
