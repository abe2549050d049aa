"""Looks, before hosts have trained for an hour, whether all of them see the folders that checkpoints go to."""

from __future__ import annotations

import os
import socket
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from fsdp_core.checkpoint.shared_folder import check_shared
from fsdp_core.errors import CheckpointError
from fsdp_core.lightning.launchers.requeueing import requeue_signal_of
from fsdp_core.runtime import Runtime

__all__ = ["check_all_resume", "check_checkpoint_folders", "check_parent_folder"]


def check_checkpoint_folders(trainer: pl.Trainer, runtime: Runtime) -> None:
    """Raise if hosts do not share the folder of a checkpoint callback. All ranks must call it.

    The folder of a callback that has no ``dirpath`` yet is checked at the first save. What is saved on SIGTERM and
    SLURM's signal goes to ``default_root_dir``. Few runs need it, so that hosts which do not share it only get a
    warning.

    Raises:
        CheckpointError: They do not share it.
    """
    callbacks: Any = trainer.checkpoint_callbacks
    folders = dict.fromkeys(os.fspath(callback.dirpath) for callback in callbacks if getattr(callback, "dirpath", None))
    for folder in runtime.broadcast_object(list(folders)):
        check_shared(folder, runtime)
    saves_on_exception = any(
        isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        for callback in callbacks
    )
    requeue_signal = requeue_signal_of(getattr(trainer.strategy, "cluster_environment", None))
    if saves_on_exception and requeue_signal is None:
        return  # on SIGTERM that callback saves, so nothing goes to default_root_dir
    try:
        check_shared(str(trainer.default_root_dir), runtime)
    except CheckpointError as error:
        rank_zero_warn(
            f"a signal that ends the fit, such as a scheduler's, will leave no checkpoint: {error}\n"
            "Or give it a default_root_dir that they share, or save with ModelCheckpoint(save_on_exception=True)."
        )


def check_all_resume(path: str | None, runtime: Runtime) -> None:
    """Raise if some ranks have found a checkpoint to go on from, and others none. All ranks must call it.

    Args:
        path: What this rank has found.
        runtime: The ranks.

    Raises:
        CheckpointError: Rank 0 and another have not both found one. Those that have would wait for the others.
    """
    first_path, first_host = runtime.broadcast_object((path, socket.gethostname()))
    if not runtime.total([(path is None) != (first_path is None)])[0]:
        return
    paths_and_hosts = runtime.gather_objects_to((path, socket.gethostname()))
    message = None
    if paths_and_hosts is not None:
        other_rank = next(
            rank
            for rank, (path_of_rank, _) in enumerate(paths_and_hosts)
            if (path_of_rank is None) != (first_path is None)
        )
        other_path, other_host = paths_and_hosts[other_rank]
        rank_with, rank_without = f"rank 0 on {first_host}", f"rank {other_rank} on {other_host}"
        if first_path is None:
            rank_with, rank_without = rank_without, rank_with
        message = (
            f"{rank_with} has found {first_path or other_path} to go on from, and {rank_without} finds none, or "
            "has no ckpt_path.\n"
            "Give all ranks the same ckpt_path, and save to a folder that all hosts share. If they do, the second has "
            "not seen yet what is new in it: start again."
        )
    raise CheckpointError(runtime.broadcast_object(message))


def check_parent_folder(path: str, num_nodes: int, runtime: Runtime) -> None:
    """Raise if hosts do not share the folder that a checkpoint goes into. All ranks must call it.

    Args:
        path: The checkpoint, the same on all ranks.
        num_nodes: How many hosts there are: nothing is done on one.
        runtime: The ranks.

    Raises:
        CheckpointError: They do not share it.
    """
    if num_nodes > 1:
        check_shared(os.path.dirname(path.rstrip("/")) or ".", runtime)
