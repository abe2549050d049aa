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
from fsdp_core.checkpoint.storage.joined_folder import Paths
from fsdp_core.checkpoint.storage.recognition import is_sharded
from fsdp_core.errors import CheckpointError, FSDPError
from fsdp_core.lightning.capability_checks import check_checkpoint
from fsdp_core.lightning.checkpoints.full.file import read_full_file, write_full
from fsdp_core.lightning.checkpoints.shared_disk import check_folder_around

if TYPE_CHECKING:
    from fsdp_core.lightning.strategy_saving import SavingStrategy

__all__ = [
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


def write_file(
    strategy: SavingStrategy,
    path: str,
    full_state: dict[str, Any],
    live: Any,
    storage_options: Any,
    async_saves: AsyncSaves | None,
) -> None:
    """Write a gathered state as a full file. All ranks must call it.

    Args:
        strategy: The strategy, whose ``CheckpointIO`` writes it.
        path: The file.
        full_state: The gathered state, on rank 0.
        live: What it was gathered from.
        storage_options: For the ``CheckpointIO``.
        async_saves: Writes in the background; ``None`` to write now.
    """
    io = users_io(strategy)
    with unwrap_exceptions_of(io):
        write_full(
            path,
            full_state,
            live,
            write=lambda gathered: _write_beside(strategy.checkpoint_io, gathered, path, storage_options),
            runtime=strategy.runtime,
            async_saves=async_saves,
            replaces_any=io is not None,
        )


def _write_beside(io: CheckpointIO, full_state: dict[str, Any], path: str, storage_options: Any) -> None:
    """Write a new file beside the one at a path, and replace the old one once the new one is complete.

    So a full disk, or a kill, leaves the old one.
    """
    if type(io) is not TorchCheckpointIO or "://" in path:  # an object store replaces at once
        io.save_checkpoint(full_state, path, storage_options=storage_options)
        return
    # a name that no search of Lightning's takes for a checkpoint, if a kill leaves it
    beside = os.path.join(os.path.dirname(path), f".saving-{uuid.uuid4().hex[:8]}")
    try:
        io.save_checkpoint(full_state, beside, storage_options=storage_options)
        os.replace(beside, path)
    finally:
        with suppress(FileNotFoundError):  # it was moved, unless something was raised
            os.remove(beside)


def write_folder(
    strategy: SavingStrategy,
    target: SaveTarget,
    state: dict[str, Any],
    storage_options: Any,
    async_saves: AsyncSaves | None,
    *,
    kinds: Mapping[str, str],
    aliases: Mapping[str, str],
    deferred: Callable[[Tensor], Sequence[Tensor] | None] | None = None,
) -> None:
    """Write each rank's part of a sharded folder. All ranks must call it.

    Args:
        strategy: The strategy.
        target: The folder.
        state: What this rank holds.
        storage_options: Refused: no ``CheckpointIO`` writes folders.
        async_saves: Writes in the background; ``None`` to write now.
        kinds: By path in the state, ``"model"`` or ``"optimizer"``.
        aliases: The further names of tied parameters, by path in the state.
        deferred: Which tensors are copied in the background as well; see :meth:`AsyncSaves.save`.
    """
    strategy.refuse_storage_options(storage_options)
    if not target.scattered:
        check_folder_around(target.path, strategy.num_nodes, strategy.runtime)
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
    )


def users_io(strategy: SavingStrategy) -> CheckpointIO | None:
    """The ``CheckpointIO`` that writes, reads and removes full files in its own way; ``None`` if torch's format does.

    Args:
        strategy: The strategy that it was given to.
    """
    io = strategy.checkpoint_io if strategy.state_dict_type == "full" else None
    return None if type(io) is TorchCheckpointIO else io


def io_for(strategy: SavingStrategy, path: str) -> CheckpointIO | None:
    """The user's ``CheckpointIO`` for a path; ``None`` if there is none, or a sharded checkpoint is at the path."""
    io = users_io(strategy)
    return None if io is None or is_sharded(path) else io


@contextmanager
def unwrap_exceptions_of(io: CheckpointIO | None) -> Iterator[None]:
    """Let what a user's ``CheckpointIO`` raises reach the caller as it is, on the rank where it was raised.

    Other ranks, and all without such a plugin, get the error that names the rank.
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


def read_checkpoint(strategy: SavingStrategy, path: Paths, weights_only: bool | None) -> tuple[Any, bool]:
    """Read a sharded folder or a full file, whichever is found. All ranks must call it.

    What is no sharded folder is read by the user's ``CheckpointIO`` on every rank, as by Lightning's own strategies.

    Args:
        strategy: The strategy, whose plugin declares which of the two it reads.
        path: A local path or an fsspec URL, the same on all ranks; or several, the places of a scattered save.
        weights_only: ``False`` lets a full file execute code.

    Returns:
        The saved state (tensors of a folder are not read yet), and whether it is a folder.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
        CheckpointFormatError: Some rank finds no readable checkpoint there, or a damaged part of it.
    """
    runtime = strategy.runtime
    # a user's CheckpointIO may write folders, too
    is_sharded_folder = checkpoints.is_folder if users_io(strategy) is None else is_sharded
    # a host that lacks the path must not look for a file there while the others read a folder together
    is_here = not isinstance(path, str) or run_on_all(runtime, f"looking for {path}", lambda: is_sharded_folder(path))
    sharded = total(runtime, [is_here])[0] > 0
    check_checkpoint(strategy.strategy_name, "sharded" if sharded else "full", f"to load {path!r}")
    if sharded or not isinstance(path, str):
        return checkpoints.load(path, runtime=runtime), True
    io = users_io(strategy)
    read: Callable[..., Any] = read_full_file if io is None else io.load_checkpoint
    contents: list[Any] = []
    with unwrap_exceptions_of(io):
        run_on_all(runtime, f"reading {path}", lambda: contents.append(read(path, weights_only=weights_only)))
    return contents[0], False
