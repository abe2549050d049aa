"""The ``full`` checkpoint: one file that plain torch and Lightning read, gathered on rank 0."""

from __future__ import annotations

import contextlib
import os
import uuid
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import ChunkedTensor, is_checkpoint, remove
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.storage.local_or_remote_folder import open_folder
from fsdp_core.checkpoint.storage.recognition import is_scattered_part
from fsdp_core.errors import CheckpointExistsError, CheckpointFormatError
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.backend import Backend
from fsdp_core.state.block_quantised import is_saved_quantised, join_quantised

__all__ = ["gather_full", "read_full_file", "write_full", "write_in_place_of_checkpoint", "write_on_rank_zero"]


def gather_full(value: Any, backend: Backend) -> Any:
    """Replace every sharded tensor in a nest of dicts, lists and tuples by its full tensor, on rank 0's CPU.

    All ranks must call it, with the same sharded tensors under the same keys; rank 0 may have further ones. Tensors
    that share memory stay shared.
    """
    if isinstance(value, dict):
        children = {k: gather_full(value[k], backend) for k in sorted(value, key=str)}  # in one order on all ranks
        if is_saved_quantised(value) and backend.runtime.rank == 0:
            return join_quantised(children)
        return {k: children[k] for k in value}
    if isinstance(value, list):
        return [gather_full(v, backend) for v in value]
    if type(value) is tuple:
        return tuple(gather_full(v, backend) for v in value)
    return backend.full_tensor(value) if isinstance(value, torch.Tensor | ChunkedTensor) else value


def write_full(
    path: str,
    full_state: dict[str, Any],
    *,
    gathered_from: object,
    write: Callable[[dict[str, Any]], None],
    runtime: Runtime,
    async_saves: AsyncSaves | None,
    may_replace_folders: bool = False,
) -> None:
    """Write a gathered state to a file, now or in the background. All ranks must call it.

    Args:
        path: The file.
        full_state: The gathered state, on rank 0.
        gathered_from: The nests of tensors that ``full_state`` was gathered from. What shares memory with them is
            copied before it is written in the background, since training writes to it.
        write: Writes a state to the file.
        runtime: The ranks.
        async_saves: Writes in the background; ``None`` to write now.
        may_replace_folders: As in :func:`write_in_place_of_checkpoint`.

    Raises:
        CheckpointError: The file can't be written; or, in the background, the state can't be copied.
    """
    if async_saves is None:
        write_on_rank_zero(path, lambda: write(full_state), runtime, may_replace_folders=may_replace_folders)
        return

    def copy_on_rank_zero() -> dict[str, Any]:
        if runtime.rank != 0:
            return {}
        copied: dict[str, Any] = _copy_nest(full_state, _storage_addresses(gathered_from), {})
        return copied

    copied_state = run_on_all(runtime, f"preparing to save {path}", copy_on_rank_zero)

    def write_copy(ranks: Runtime) -> None:
        write_on_rank_zero(path, lambda: write(copied_state), ranks, may_replace_folders=may_replace_folders)

    async_saves.run(f"saving {path}", write_copy)


def _storage_addresses(value: Any) -> set[int]:
    """The addresses of storages in host memory: those of all tensors in a nest."""
    if isinstance(value, dict):
        return set[int]().union(*map(_storage_addresses, value.values()))
    if isinstance(value, list | tuple):
        return set[int]().union(*map(_storage_addresses, value))
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, torch.Tensor) and local.device.type == "cpu":
        return {local.untyped_storage().data_ptr()}
    return set()


def _copy_nest(value: Any, live_storages: set[int], memo: dict[int, Any]) -> Any:
    """Copy a nest so that it shares no objects or memory with training; gathered tensors are not copied.

    Args:
        value: The nest, or a part of it.
        live_storages: The addresses of the storages that training writes to.
        memo: Of ``deepcopy``, so that what the nest holds twice is copied once.
    """
    if isinstance(value, dict):
        return {k: _copy_nest(v, live_storages, memo) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_nest(v, live_storages, memo) for v in value)
    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in live_storages:
        return value
    return deepcopy(value, memo)


def write_on_rank_zero(
    path: str | Path, write: Callable[[], None], runtime: Runtime, *, may_replace_folders: bool = False
) -> None:
    """Write a file on rank 0, and raise on all ranks if that fails.

    A sharded checkpoint at the path is moved aside first, and removed only once the file is written.

    Raises:
        CheckpointExistsError: The path is a folder that holds no checkpoint.
        CheckpointError: Rank 0 failed.
    """

    def write_if_rank_zero() -> None:
        if runtime.rank == 0:
            write_in_place_of_checkpoint(Path(path), write, may_replace_folders=may_replace_folders)

    run_on_all(runtime, f"writing {path}", write_if_rank_zero)


def write_in_place_of_checkpoint(path: Path, write: Callable[[], None], *, may_replace_folders: bool = False) -> None:
    """Call ``write`` to write a file to a path. A sharded checkpoint there is removed once the file is written.

    Args:
        path: The path.
        write: Writes the file.
        may_replace_folders: Whether ``write`` knows what to do with a folder at the path that is no checkpoint.

    Raises:
        CheckpointExistsError: The path is a folder that holds no checkpoint.
    """
    moved_checkpoint: Path | None = None
    if path.is_dir() and (is_checkpoint(path) or is_scattered_part(path)):
        moved_checkpoint = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        os.rename(path, moved_checkpoint)
    elif path.is_dir() and not may_replace_folders:
        raise CheckpointExistsError(
            f"can't write a full checkpoint to {path}: a folder is there that holds no checkpoint.\n"
            "Choose another path, or remove the folder yourself."
        )
    try:
        write()
    except BaseException:
        if moved_checkpoint is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.rename(moved_checkpoint, path)
        raise
    if moved_checkpoint is not None:
        remove(moved_checkpoint)


def read_full_file(path: str, weights_only: bool | None) -> Any:
    """Read a full checkpoint without executing code from it; a local file is memory-mapped.

    Args:
        path: The file: a local path or an fsspec URL.
        weights_only: ``False`` lets the file execute code, which only the user can decide.

    Raises:
        CheckpointFormatError: There is no such file, or it can't be read without executing code.
    """
    folder = open_folder(path)
    if folder.kind() == "missing":
        raise CheckpointFormatError(f"there is no checkpoint at {path}.\nCheck the path; it is read on every host.")
    with folder.fs.open(folder.root, "rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise CheckpointFormatError(
                f"{path} is a file, but not one that torch.save has completed: a sharded checkpoint is a folder, a "
                "full one such a file.\nCheck the path, and whether its disk was full or its job killed; load and save "
                "a file of torch before 1.6 again with a newer torch."
            )
        stream.seek(0)
        try:
            is_safe = weights_only is not False  # so None, Lightning's default, executes nothing
            if folder.local:
                return torch.load(folder.root, map_location="cpu", weights_only=is_safe, mmap=True)
            return torch.load(stream, map_location="cpu", weights_only=is_safe)
        except Exception as error:
            raise CheckpointFormatError(
                f"{path} can't be read as a full checkpoint: {type(error).__name__}: {error}\n"
                "If it holds objects other than tensors and plain data and you trust it, allow their classes with "
                "torch.serialization.add_safe_globals([...])."
            ) from error
