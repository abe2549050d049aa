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

__all__ = ["Attempts", "newest"]


class Attempts:
    """The attempts that have led to the state of a strategy's module."""

    def __init__(self) -> None:
        self._before: list[dict[str, Any]] = []
        self._amid_a_step = False
        self._attempts: list[dict[str, Any]] = []

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint.

        Args:
            state: What the checkpoint holds of ours; ``None`` if it holds none.
        """
        self._before = list((state or {}).get("attempts", ()))
        self._amid_a_step = "gradients" in (state or {})

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
        chosen = any(isinstance(callback, GlobalBatch) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        last = self._before[-1] if self._before else None
        if last is not None and last["ranks"] != ranks:
            if keeps_global_batch(trainer) and self._amid_a_step:
                raise CheckpointMismatchError(
                    f"the checkpoint was saved on {last['ranks']} data-parallel ranks amid the accumulation of a step, "
                    f"and what is left of its global batch can't be divided over {ranks}.\nResume on {last['ranks']}, "
                    "or from a checkpoint that was saved after a step."
                )
            if not chosen:
                _warn(last, attempt, size)
        self._amid_a_step = False
        before = self._before or (self._attempts if trainer.global_step else [])  # or this Trainer has fitted before
        self._attempts = [*before, attempt]
        self._before = []

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint holds of them."""
        return self._attempts


def _warn(last: Mapping[str, Any], current: Mapping[str, Any], size: int | None) -> None:
    was = last["samples"]
    becomes = current["samples"]
    if was is not None and was == becomes:
        return
    if was is None or becomes is None:  # the loaders don't say; what a rank takes is taken to be the same
        batches = last["ranks"] * last["accumulate"]
        batches_now = current["ranks"] * current["accumulate"]
        if batches == batches_now:
            return
        change = f"{batches} batches of the loader and is {batches_now}"
    else:
        change = f"{was} samples and is {becomes}"
    keep = f"GlobalBatch({was or '...'}, per_rank={size or '...'})"
    rank_zero_warn(
        f"the checkpoint was saved on {last['ranks']} data-parallel ranks, and there are {current['ranks']} now: the "
        f"global batch was {change} now.\nTo keep it, by accumulation, give the Trainer the callback "
        f"fsdp_core.lightning.{keep}. To let it change with the ranks, give it GlobalBatch('scaled'), and adapt the "
        "learning rate if it needs that."
    )


def newest(paths: Iterable[str]) -> str | None:
    """The newest of several checkpoints of Trainers, by their attempts and steps, on no clock.

    Args:
        paths: Sharded checkpoints.

    Returns:
        The newest; ``None`` if that is not known: a checkpoint can't be read or tells no attempts, or none goes on
        from all others.
    """
    candidates: dict[str, tuple[list[str], int]] = {}
    for path in sorted(paths):  # ranks must choose the same of two that are equally new
        try:
            folder = open_folder(path)
            plain = read_plain(StoredFiles(folder, read_manifest(folder)))
        except Exception:  # the load names the fault, if it is this one that is loaded
            return None
        attempts, step = (
            part_at(plain, ["trainer", "fsdp_core", "attempts"]),
            part_at(plain, ["trainer", "global_step"]),
        )
        if not isinstance(attempts, list) or not attempts or not isinstance(step, int):
            return None
        candidates[path] = [str(attempt["id"]) for attempt in attempts], step
    for path, (ids, step) in candidates.items():
        if all(_goes_on(ids, step, *candidate) for candidate in candidates.values()):
            return path
    return None


def _goes_on(ids: list[str], step: int, other_ids: list[str], other_step: int) -> bool:
    """Whether the first of two checkpoints is as new as the other, or newer."""
    return step >= other_step if ids == other_ids else len(ids) > len(other_ids) and ids[: len(other_ids)] == other_ids
