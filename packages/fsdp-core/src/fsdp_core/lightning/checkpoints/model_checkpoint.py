"""Makes ``ModelCheckpoint`` aware of checkpoints that are still being written."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from fsdp_core.checkpoint import is_folder, remove

__all__ = ["link", "treat_pending_saves_as_done"]


def treat_pending_saves_as_done(callbacks: Iterable[pl.Callback]) -> None:
    """Make callbacks choose names and create links as if pending saves were already done.

    The name of a pending save is not free, and ``last`` may only become a link to a complete checkpoint. Overrides
    ``_link_checkpoint``, which has no public name.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            instance: Any = callback
            instance.file_exists = partial(_file_exists, callback)
            instance._link_checkpoint = _link_checkpoint


def _file_exists(callback: ModelCheckpoint, filepath: str | Path, trainer: pl.Trainer) -> bool:
    features: Any = getattr(trainer.strategy, "features", None)
    if features is not None and str(filepath) in features.saves.will_exist:
        return bool(features.saves.will_exist[str(filepath)])
    return type(callback).file_exists(callback, filepath, trainer)


def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    features: Any = getattr(trainer.strategy, "features", None)
    is_scattered = getattr(trainer.strategy, "scattered_save", False)
    # The callback may belong to another Trainer now, with a strategy that is not ours or that saves at once.
    if features is None or (features.saves.writer is None and not is_scattered):
        ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)
    elif os.path.abspath(filepath) != os.path.abspath(linkpath):
        job = partial(link, filepath, linkpath)
        features.saves.run_in_order(f"linking {linkpath} to {filepath}", job, will_exist={linkpath: True})


def link(filepath: str, linkpath: str) -> None:
    """Replace a path by a link to a checkpoint, or by a copy if the system does not permit links.

    Args:
        filepath: The checkpoint.
        linkpath: The path of the link. Nothing may be there, or a link, a file or a checkpoint, which is replaced.
    """
    unfinished_path = f"{linkpath}.{uuid.uuid4().hex[:12]}.partial"
    try:
        os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), unfinished_path)
    except OSError:
        copy = shutil.copytree if is_folder(filepath) else shutil.copy
        copy(filepath, unfinished_path)
    if os.path.isdir(linkpath) and not os.path.islink(linkpath):
        remove(linkpath)  # os.replace() replaces files and links, but no folder
    os.replace(unfinished_path, linkpath)
