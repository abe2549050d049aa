"""Saves and reads checkpoints of either kind, a sharded folder or a full file, for both front ends."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch import Tensor

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.collective import run_on_all, total
from fsdp_core.checkpoint.format.base_tensors import BaseSource
from fsdp_core.checkpoint.storage.joined_folder import Paths
from fsdp_core.checkpoint.storage.recognition import is_sharded
from fsdp_core.errors import CheckpointError, FSDPError
from fsdp_core.lightning.capability_checks import check_checkpoint
from fsdp_core.lightning.checkpoints.full.file import read_full_file, write_full
from fsdp_core.lightning.checkpoints.shared_disk import check_parent_folder

if TYPE_CHECKING:
    from fsdp_core.lightning.strategy_saving import SavingStrategy

__all__ = [
    "OpenedCheckpoint",
    "SaveTarget",
    "io_for",
    "read_checkpoint",
    "unwrap_exceptions_of",
    "users_io",
    "write_file",
    "write_folder",
]


@dataclass(frozen=True)
class SaveTarget:
    """Where a rank saves.

    Attributes:
        path: A folder for sharded checkpoints, a file for full ones.
        scattered: Whether each rank saves at a path of its own.
        is_reported: Whether the caller passes the folder on to Ray Train as soon as the call returns, so that a save in
            the background would come too late.
    """

    path: str
    scattered: bool = False
    is_reported: bool = False


@dataclass(frozen=True)
class OpenedCheckpoint:
    """What was read of a checkpoint.

    Attributes:
        state: The saved state. Tensors of a folder are not read yet.
        is_folder: Whether it is a sharded folder, and not a full file.
    """

    state: Any
    is_folder: bool


def write_file(
    strategy: SavingStrategy,
    path: str,
    full_state: dict[str, Any],
    *,
    gathered_from: object,
    storage_options: Any,
    async_saves: AsyncSaves | None,
) -> None:
    """Write a gathered state as a full file. All ranks must call it.

    Args:
        strategy: The strategy, whose ``CheckpointIO`` writes it.
        path: The file.
        full_state: The gathered state, on rank 0.
        gathered_from: The nests of tensors that ``full_state`` was gathered from, and may share memory with.
        storage_options: For the ``CheckpointIO``.
        async_saves: Writes in the background; ``None`` to write now.
    """
    io = users_io(strategy)
    with unwrap_exceptions_of(io):
        write_full(
            path,
            full_state,
            gathered_from=gathered_from,
            write=lambda gathered: _write_then_replace(strategy.checkpoint_io, gathered, path, storage_options),
            runtime=strategy.runtime,
            async_saves=async_saves,
            may_replace_folders=io is not None,
        )


def _write_then_replace(io: CheckpointIO, full_state: dict[str, Any], path: str, storage_options: Any) -> None:
    """Write a file under another name, and rename it to ``path`` once it is complete.

    So a full disk, or a kill, leaves the file that was at ``path``.
    """
    if type(io) is not TorchCheckpointIO or "://" in path:  # an object store replaces at once
        io.save_checkpoint(full_state, path, storage_options=storage_options)
        return
    # a name that no search of Lightning's takes for a checkpoint, if a kill leaves the file
    unfinished_path = os.path.join(os.path.dirname(path), f".saving-{uuid.uuid4().hex[:8]}")
    try:
        io.save_checkpoint(full_state, unfinished_path, storage_options=storage_options)
        os.replace(unfinished_path, path)
    finally:
        with suppress(FileNotFoundError):  # the file was renamed, unless something was raised
            os.remove(unfinished_path)


def write_folder(
    strategy: SavingStrategy,
    target: SaveTarget,
    state: dict[str, Any],
    *,
    storage_options: Any,
    async_saves: AsyncSaves | None,
    kinds: Mapping[str, str],
    aliases: Mapping[str, str],
    base_source: BaseSource | None = None,
    deferred: Callable[[Tensor], Sequence[Tensor] | None] | None = None,
) -> None:
    """Write each rank's part of a sharded folder. All ranks must call it.

    Args:
        strategy: The strategy.
        target: The folder.
        state: What this rank holds.
        storage_options: Refused: no ``CheckpointIO`` writes folders.
        async_saves: Writes in the background; ``None`` to write now.
        kinds: By the path of a part of the state, what it is: ``"model"`` or ``"optimizer"``.
        aliases: By the path of a tied parameter's further name, the path of the name that it is saved under.
        base_source: Where the base of what the state leaves out comes from.
        deferred: Which tensors are copied in the background as well; see :meth:`AsyncSaves.save`.
    """
    strategy.refuse_storage_options(storage_options)
    if not target.scattered:
        check_parent_folder(target.path, strategy.num_nodes, strategy.runtime)
    save: Callable[..., Any]
    if async_saves is None:
        save = partial(checkpoints.save, runtime=strategy.runtime, one_after_another=strategy.sequential_save)
    else:
        save = partial(async_saves.save, deferred=deferred)
    save(
        target.path,
        state,
        strategy=strategy.strategy_name,
        kinds=kinds,
        aliases=aliases,
        scattered=target.scattered,
        base_source=base_source,
    )


def users_io(strategy: SavingStrategy) -> CheckpointIO | None:
    """The user's ``CheckpointIO``, which writes, reads and removes full files; ``None`` for files in torch's format.

    Args:
        strategy: The strategy that the user has given it to.
    """
    io = strategy.checkpoint_io if strategy.state_dict_type == "full" else None
    return None if type(io) is TorchCheckpointIO else io


def io_for(strategy: SavingStrategy, path: str) -> CheckpointIO | None:
    """The user's ``CheckpointIO`` for a path; ``None`` if there is none, or a sharded checkpoint is at the path."""
    io = users_io(strategy)
    return None if io is None or is_sharded(path) else io


@contextmanager
def unwrap_exceptions_of(io: CheckpointIO | None) -> Iterator[None]:
    """A context that raises what a user's ``CheckpointIO`` has raised, in place of the ``CheckpointError`` around it.

    Other ranks than the one where the plugin has raised, and all ranks without such a plugin, raise the
    ``CheckpointError``, which names the rank.
    """
    original: BaseException | None = None
    try:
        yield
    except CheckpointError as error:
        original = error.__cause__
        if io is None or original is None or isinstance(original, FSDPError):
            raise
        original.add_note(f"{error}\nThe other ranks raise this as CheckpointError.")
    if original is not None:
        raise original


def read_checkpoint(strategy: SavingStrategy, path: Paths, weights_only: bool | None) -> OpenedCheckpoint:
    """Read a sharded folder or a full file, whichever is at the path. All ranks must call it.

    What is no sharded folder is read by the user's ``CheckpointIO`` on every rank, as by Lightning's own strategies.

    Args:
        strategy: The strategy, whose plugin declares which of the two it reads.
        path: A local path or an fsspec URL, the same on all ranks; or several, the places of a scattered save.
        weights_only: ``False`` lets a full file execute code.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare that it reads such a checkpoint.
        CheckpointFormatError: Some rank finds no readable checkpoint there, or a damaged part of it.
    """
    runtime = strategy.runtime
    io = users_io(strategy)
    # a user's CheckpointIO may write folders, too: only one with our manifest is sharded
    is_sharded_at = checkpoints.is_folder if io is None else is_sharded
    # several paths are the folders of a scattered save
    rank_sees_folder = not isinstance(path, str) or run_on_all(
        runtime, f"looking for {path}", lambda: is_sharded_at(path)
    )
    # a host that lacks the path must not look for a file there while the others read a folder together
    is_folder = total(runtime, [rank_sees_folder])[0] > 0
    check_checkpoint(strategy.strategy_name, "sharded" if is_folder else "full", f"to load {path!r}")
    if is_folder:
        return OpenedCheckpoint(checkpoints.load(path, runtime=runtime), is_folder=True)
    read: Callable[..., Any] = read_full_file if io is None else io.load_checkpoint
    with unwrap_exceptions_of(io):
        state = run_on_all(runtime, f"reading {path}", lambda: read(path, weights_only=weights_only))
    return OpenedCheckpoint(state, is_folder=False)
