"""The ``full`` checkpoint: one file that plain torch and Lightning read, gathered on rank 0."""

from __future__ import annotations

import contextlib
import os
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_core.backend import Backend
from fsdp_core.checkpoint import ChunkedTensor, is_checkpoint, remove
from fsdp_core.checkpoint.folder import open_folder
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError
from fsdp_core.runtime import Runtime

__all__ = ["gathered", "numbered", "read_full_file", "write_on_rank_zero"]


def gathered(value: Any, backend: Backend) -> Any:
    """Replace every sharded tensor in a nest of dicts, lists and tuples by its whole, on rank 0's CPU.

    All ranks must call it with nests of the same structure. Tensors that share memory stay shared.
    """
    if isinstance(value, dict):
        return {k: gathered(v, backend) for k, v in value.items()}
    if isinstance(value, list):
        return [gathered(v, backend) for v in value]
    if type(value) is tuple:
        return tuple(gathered(v, backend) for v in value)
    return backend.full_tensor(value) if isinstance(value, torch.Tensor | ChunkedTensor) else value


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Turn an optimizer state by name into the form of a plain torch optimizer's ``state_dict()``.

    Names are kept in each group as ``param_names``, as torch does for optimizers built from named parameters.

    Example:
        >>> numbered({"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]})
        {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0], 'param_names': ['w']}]}
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[n] for n in group["params"]], "param_names": list(group["params"])}
            for group in state["param_groups"]
        ],
    }


def write_on_rank_zero(path: Path, write: Callable[[], None], runtime: Runtime) -> None:
    """Let rank 0 write a file, and every rank know how it went.

    A sharded checkpoint in the file's place is set aside first, and removed only when the file is there.

    Raises:
        CheckpointExistsError: The path is a folder that holds no checkpoint.
        CheckpointError: Rank 0 failed; raised on the other ranks.
    """
    failure: Exception | None = None
    if runtime.rank == 0:
        try:
            _replace_by(path, write)
        except Exception as error:
            failure = error
    problem = runtime.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if problem is not None:
        raise CheckpointError(f"rank 0 could not write the checkpoint {path}: {problem}")


def _replace_by(path: Path, write: Callable[[], None]) -> None:
    aside: Path | None = None
    if path.is_dir():
        if not is_checkpoint(path):
            raise CheckpointExistsError(
                f"can't write a full checkpoint to {path}: a folder is there that holds no checkpoint.\n"
                "Choose another path, or remove the folder yourself."
            )
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        os.rename(path, aside)
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
    """Read a full checkpoint without executing code from it; a local one is mapped into memory.

    Args:
        path: The file: a local path or an fsspec URL.
        weights_only: ``False`` lets the file execute code, which only its user can decide.

    Raises:
        CheckpointFormatError: There is no such file, or it can't be read without executing code.
    """
    place = open_folder(path)
    if place.kind() == "missing":
        raise CheckpointFormatError(f"there is no checkpoint at {path}.\nCheck the path; it is read on every host.")
    with place.fs.open(place.root, "rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise CheckpointFormatError(
                f"{path} is a file, but none that torch.save has written: a sharded checkpoint is a folder, a full one "
                "such a file.\nCheck the path; load and save a file of torch before 1.6 again with a newer torch."
            )
        stream.seek(0)
        try:
            safe = weights_only is not False
            if place.local:
                return torch.load(place.root, map_location="cpu", weights_only=safe, mmap=True)
            return torch.load(stream, map_location="cpu", weights_only=safe)
        except Exception as error:
            raise CheckpointFormatError(
                f"{path} can't be read as a full checkpoint: {type(error).__name__}: {error}\n"
                "If it holds objects other than tensors and plain data and you trust it, allow their classes with "
                "torch.serialization.add_safe_globals([...])."
            ) from error
