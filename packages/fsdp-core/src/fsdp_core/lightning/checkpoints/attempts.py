"""The attempts of a run: each fit that went on from a checkpoint of the one before, and on how many ranks.

A checkpoint holds the attempts that led to it. So of two checkpoints it is known which is newer, without a clock: the
one whose attempts go on from those of the other, and of one attempt, that of the later step.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from fsdp_core.checkpoint.storage.local_or_remote_folder import open_folder
from fsdp_core.checkpoint.storage.plain_json import part_at, read_plain
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.lightning.global_batch import GlobalBatch, batch_size_of, data_parallel_ranks, keeps_global_batch

__all__ = ["Attempts", "find_newest"]


class Attempts:
    """The attempts that have led to the current state of a strategy's module."""

    def __init__(self) -> None:
        #: Those that a loaded checkpoint holds, until the next attempt begins.
        self._earlier_attempts: list[dict[str, Any]] = []
        #: Whether that checkpoint was saved between the micro-batches of a step.
        self._is_amid_accumulation = False
        #: Those up to the current one, which a checkpoint holds from now on.
        self._attempts: list[dict[str, Any]] = []

    def continue_from(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint.

        Args:
            state: The checkpoint's entry for exact resume; ``None`` if it has none.
        """
        self._earlier_attempts = list((state or {}).get("attempts", ()))
        self._is_amid_accumulation = "gradients" in (state or {})

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin an attempt, once the loaders are there, and warn if it has another global batch on other ranks.

        Raises:
            CheckpointMismatchError: The global batch is to be kept, and was interrupted on another number of ranks.
        """
        size = batch_size_of(trainer)
        ranks = data_parallel_ranks(trainer)
        accumulate = trainer.accumulate_grad_batches
        samples = None if size is None else size * ranks * accumulate
        attempt = {
            "id": secrets.token_hex(4),
            "step": trainer.global_step,
            "ranks": ranks,
            "accumulate": accumulate,
            "samples": samples,
        }
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        last = self._earlier_attempts[-1] if self._earlier_attempts else None
        if last is not None and last["ranks"] != ranks:
            if keeps_global_batch(trainer) and self._is_amid_accumulation:
                raise CheckpointMismatchError(
                    f"the checkpoint was saved on {last['ranks']} data-parallel ranks amid the accumulation of a step, "
                    f"and what is left of its global batch can't be divided over {ranks}.\nResume on {last['ranks']}, "
                    "or from a checkpoint that was saved after a step."
                )
            has_users_decision = any(isinstance(callback, GlobalBatch) for callback in callbacks)
            if not has_users_decision:
                _warn_of_global_batch(last, attempt, size)
        self._is_amid_accumulation = False
        if self._earlier_attempts:
            self._attempts = [*self._earlier_attempts, attempt]
        elif trainer.global_step:  # this Trainer has fitted before
            self._attempts = [*self._attempts, attempt]
        else:
            self._attempts = [attempt]
        self._earlier_attempts = []

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint holds of the attempts."""
        return self._attempts


def _warn_of_global_batch(last: Mapping[str, Any], current: Mapping[str, Any], batch_size: int | None) -> None:
    """Warn if two attempts on different numbers of ranks have different global batches."""
    samples_before = last["samples"]
    samples_now = current["samples"]
    if samples_before is not None and samples_now is not None:
        if samples_before == samples_now:
            return
        change = f"{samples_before} samples and is {samples_now}"
    else:  # a loader does not tell its batch size, which is then assumed to be the same in both attempts
        batches_before = last["ranks"] * last["accumulate"]
        batches_now = current["ranks"] * current["accumulate"]
        if batches_before == batches_now:
            return
        change = f"{batches_before} batches of the loader and is {batches_now}"
    keep = f"GlobalBatch({samples_before or '...'}, per_rank={batch_size or '...'})"
    rank_zero_warn(
        f"the checkpoint was saved on {last['ranks']} data-parallel ranks, and there are {current['ranks']} now: the "
        f"global batch was {change} now.\nTo keep it, by accumulation, give the Trainer the callback "
        f"fsdp_core.lightning.{keep}. To let it change with the ranks, give it GlobalBatch('scaled'), and adapt the "
        "learning rate if it needs that."
    )


def find_newest(paths: Iterable[str]) -> str | None:
    """The newest of several checkpoints of Trainers, by their attempts and steps, and not by any clock.

    Args:
        paths: Sharded checkpoints.

    Returns:
        The newest; ``None`` if that is not known: a checkpoint can't be read or tells no attempts, or none goes on
        from all others.
    """
    candidates: dict[str, tuple[list[str], int]] = {}  # by path: the ids of the attempts, and the step
    for path in sorted(paths):  # ranks must choose the same of two that are equally new
        try:
            folder = open_folder(path)
            plain = read_plain(StoredFiles(folder, read_manifest(folder)))
        except Exception:  # not raised here: the user may load another checkpoint, and a load of this one raises it
            return None
        attempts = part_at(plain, ["trainer", "fsdp_core", "attempts"])
        step = part_at(plain, ["trainer", "global_step"])
        if not isinstance(attempts, list) or not attempts or not isinstance(step, int):
            return None
        candidates[path] = [str(attempt["id"]) for attempt in attempts], step
    for path, (ids, step) in candidates.items():
        if all(_is_as_new_as(ids, step, other_ids, other_step) for other_ids, other_step in candidates.values()):
            return path
    return None


def _is_as_new_as(ids: list[str], step: int, other_ids: list[str], other_step: int) -> bool:
    """Whether a checkpoint is as new as another, or newer: of a later step of one attempt, or of a later attempt."""
    if ids == other_ids:
        return step >= other_step
    return len(ids) > len(other_ids) and ids[: len(other_ids)] == other_ids
