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
from fsdp_core.checkpoint.storage.recognition import is_place
from fsdp_core.errors import CheckpointExistsError, CheckpointFormatError
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.backend import Backend
from fsdp_core.state.block_quantised import is_saved_quantised, join_quantised

__all__ = ["gather_full", "read_full_file", "replace_by", "write_full", "write_on_rank_zero"]


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
    live: Any,
    *,
    write: Callable[[dict[str, Any]], None],
    runtime: Runtime,
    async_saves: AsyncSaves | None,
    replaces_any: bool = False,
) -> None:
    """Write a gathered state to a file, now or in the background. All ranks must call it.

    Args:
        path: The file.
        full_state: The gathered state, on rank 0.
        live: What it was gathered from. Tensors that share memory with it are copied if they are written later.
        write: Writes the file.
        runtime: The ranks.
        async_saves: Writes in the background; ``None`` to write now.
        replaces_any: As in :func:`replace_by`.

    Raises:
        CheckpointError: The file can't be written; or, in the background, the state can't be copied.
    """
    if async_saves is None:
        write_on_rank_zero(path, lambda: write(full_state), runtime, replaces_any)
        return
    copy: dict[str, Any] = {}

    def stage() -> None:
        if runtime.rank == 0:
            copy.update(_copy_nest(full_state, _host_memory(live), {}))

    run_on_all(runtime, f"preparing to save {path}", stage)
    async_saves.run(f"saving {path}", lambda ranks: write_on_rank_zero(path, lambda: write(copy), ranks, replaces_any))


def _host_memory(value: Any) -> set[int]:
    """The addresses of storages in host memory: those of all tensors in a nest."""
    if isinstance(value, dict):
        return set[int]().union(*map(_host_memory, value.values()))
    if isinstance(value, list | tuple):
        return set[int]().union(*map(_host_memory, value))
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, torch.Tensor) and local.device.type == "cpu":
        return {local.untyped_storage().data_ptr()}
    return set()


def _copy_nest(value: Any, live: set[int], memo: dict[int, Any]) -> Any:
    """Copy a nest so that it shares no objects or memory with training; gathered tensors are not copied."""
    if isinstance(value, dict):
        return {k: _copy_nest(v, live, memo) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_nest(v, live, memo) for v in value)
    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in live:
        return value
    return deepcopy(value, memo)


def write_on_rank_zero(
    path: str | Path, write: Callable[[], None], runtime: Runtime, replaces_any: bool = False
) -> None:
    """Write a file on rank 0, and raise on all ranks if that fails.

    A sharded checkpoint at the path is moved aside first, and removed only once the file is written.

    Raises:
        CheckpointExistsError: The path is a folder that holds no checkpoint.
        CheckpointError: Rank 0 failed.
    """

    def step() -> None:
        if runtime.rank == 0:
            replace_by(Path(path), write, replaces_any)

    run_on_all(runtime, f"writing {path}", step)


def replace_by(path: Path, write: Callable[[], None], replaces_any: bool = False) -> None:
    """Call ``write`` to write a file to a path. A sharded checkpoint there is removed once the file is written.

    Args:
        path: The path.
        write: Writes it.
        replaces_any: Whether ``write`` may find another folder there, and knows what to do with it.

    Raises:
        CheckpointExistsError: The path is a folder that holds no checkpoint.
    """
    aside: Path | None = None
    if path.is_dir() and (is_checkpoint(path) or is_place(path)):
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        os.rename(path, aside)
    elif path.is_dir() and not replaces_any:
        raise CheckpointExistsError(
            f"can't write a full checkpoint to {path}: a folder is there that holds no checkpoint.\n"
            "Choose another path, or remove the folder yourself."
        )
    try:
        write()
    except BaseException:
        if aside is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.rename(aside, path)
        raise
    if aside is not None:
        remove(aside)


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
            safe = weights_only is not False
            if folder.local:
                return torch.load(folder.root, map_location="cpu", weights_only=safe, mmap=True)
            return torch.load(stream, map_location="cpu", weights_only=safe)
        except Exception as error:
            raise CheckpointFormatError(
                f"{path} can't be read as a full checkpoint: {type(error).__name__}: {error}\n"
                "If it holds objects other than tensors and plain data and you trust it, allow their classes with "
                "torch.serialization.add_safe_globals([...])."
            ) from error
