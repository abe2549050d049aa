"""The positions of a Trainer's training loaders, in its checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from fsdp_core.checkpoint.collective import gather_to_first
from fsdp_core.lightning.loaders.loader_states import (
    describe_loader,
    explain_unknown_order,
    has_state,
    is_at_end,
    make_entry,
    state_of_own_rank,
    states_in,
    track_loader,
)
from fsdp_core.lightning.loaders.position import copy_without_position, position_of
from fsdp_core.lightning.private import (
    always_load_loader_states,
    before_each_fetch,
    begin_an_epoch,
    combined_loader,
    deciding_loader,
    fetcher_of,
    has_fetched_ahead,
    has_states_to_load,
    load_loader_states,
    set_sampler_epoch,
)
from fsdp_core.runtime import Runtime

__all__ = ["TrainingLoaders", "warn_of_lost_positions"]

_KEY = "data_loaders"


class TrainingLoaders:
    """Saves and restores the positions of a Trainer's training loaders."""

    def __init__(self) -> None:
        #: The epoch that samplers were set to last.
        self._epoch = 0
        # Of a loaded checkpoint, until the fit starts: whether its epoch is over; whether that epoch's last batch was
        # trained, though Lightning does not count it as completed; and whether batches are left of the epoch.
        self._epoch_is_over = self._last_batch_was_done = self._is_mid_epoch = False
        self._restored_states: list[Any] = []
        # By loader: before the last fetch, where Lightning fetches ahead, and after a fit has ended.
        self._states_before_fetch: list[Any] | None = None
        self._states_after_fit: list[Any] | None = None
        self._training_loaders, self._other_loaders = WeakSet[DataLoader[Any]](), WeakSet[DataLoader[Any]]()

    # -- in the course of a fit ------------------------------------------------------------------------------------

    def prepare(self, loader: object, trainer: pl.Trainer) -> object:
        """Track a loader that Lightning has prepared for training, before it is iterated over.

        Returns:
            The loader; or a copy of it, if it is also the one for validation.
        """
        if isinstance(loader, DataLoader):
            tracked: DataLoader[Any] = copy_without_position(loader) if loader in self._other_loaders else loader
            track_loader(tracked)
            self._training_loaders.add(tracked)
            loader = tracked
        # Lightning sets the epoch only after the first iterator is created, which would have the order of epoch 0.
        # After the last batch of an epoch, Lightning counts the epoch as done only once it has created the loaders.
        self._epoch = _epochs_done(trainer) + (1 if self._last_batch_was_done else 0)
        set_sampler_epoch(loader, self._epoch)
        self._states_after_fit = None
        return loader

    def prepare_other(self, loader: object) -> object:
        """Note a loader that Lightning has prepared for validation, tests or predictions.

        Returns:
            The loader; or a copy of it if it is also the one for training, whose position its iterators would move.
        """
        if not isinstance(loader, DataLoader):
            return loader
        self._other_loaders.add(loader)
        return copy_without_position(loader) if loader in self._training_loaders else loader

    def begin_epoch_if_due(self, trainer: pl.Trainer) -> None:
        """Begin the next epoch, after Lightning has restored its loops' progress, if the last one is over."""
        if self._epoch_is_over:
            begin_an_epoch(trainer.fit_loop)

    def start(self, trainer: pl.Trainer) -> None:
        """Correct what Lightning has restored, before the first batch of a fit is fetched."""
        loop = trainer.fit_loop
        combined = combined_loader(loop)
        fetcher = fetcher_of(loop)
        if combined is None or fetcher is None:
            return
        epoch = _epochs_done(trainer)
        has_pending_states = has_states_to_load(loop)
        # The loaders may have been created early, for trainer.estimated_stepping_batches.
        if has_pending_states or epoch != self._epoch:
            for loader in combined.flattened:
                set_sampler_epoch(loader, epoch)
            load_loader_states(loop)
            iter(fetcher)
            self._epoch = epoch
        if loop.restarting:
            if loop.epoch_loop.batch_progress.is_last_batch and not self._last_batch_was_done:
                # Lightning first ends the epoch, then creates new iterators: only these must get the states.
                load_loader_states(loop, self._restored_states)
            _recount_batches(loop, combined)
        if self._is_mid_epoch:
            _warn_of_starting_over(combined, has_states=bool(self._restored_states))
        self._epoch_is_over = self._last_batch_was_done = self._is_mid_epoch = False
        self._restored_states = []
        self._states_before_fetch = None
        if fetcher.length is None:
            # Lightning fetches a batch ahead to find the end, so the positions before each fetch are kept.
            before_each_fetch(loop, lambda: self._keep_states_before_fetch(loop))

    def _keep_states_before_fetch(self, loop: Any) -> None:
        self._states_before_fetch = copy.deepcopy(_states_of_loaders(loop))

    def finish(self, trainer: pl.Trainer) -> None:
        """Record the positions while the loaders have them; a checkpoint may be saved after the fit."""
        fetcher = fetcher_of(trainer.fit_loop)
        if trainer.state.fn == TrainerFn.FITTING and fetcher is not None and fetcher.iterator is not None:
            self._states_after_fit = self._current_states(trainer)

    def _current_states(self, trainer: pl.Trainer) -> list[Any]:
        """The loaders' states as of the last batch that training has used, also after the fit."""
        loop = trainer.fit_loop
        if fetcher_of(loop) is None:
            return self._states_after_fit or []
        if self._states_before_fetch is not None and has_fetched_ahead(loop):
            return self._states_before_fetch
        return _states_of_loaders(loop)

    # -- in a checkpoint -------------------------------------------------------------------------------------------

    def save(self, checkpoint: Mapping[str, Any], trainer: pl.Trainer, runtime: Runtime) -> dict[str, Any]:
        """Return the checkpoint with the positions of all ranks on rank 0, which writes it. All ranks must call it.

        Args:
            checkpoint: Lightning's checkpoint dict. It is not changed.
            trainer: The Trainer.
            runtime: The ranks.
        """
        loop = checkpoint.get("loops", {}).get("fit_loop")
        combined = combined_loader(trainer.fit_loop)
        if loop is None or combined is None:
            return dict(checkpoint)
        own_states: list[Any] = []

        def read_own_states() -> list[Any]:
            own_states.extend(self._current_states(trainer))
            return own_states

        gathered_states = gather_to_first(runtime, "reading the positions of the data loaders", read_own_states)
        states_by_rank = [own_states] if gathered_states is None else runtime.by_data_parallel_rank(gathered_states)
        names = [describe_loader(loader) for loader in combined.flattened if has_state(loader)]
        states_by_loader = zip(*states_by_rank, strict=False)
        entries = [make_entry(name, states) for name, states in zip(names, states_by_loader, strict=False)]
        progress = {key: value for key, value in loop["state_dict"].items() if key != "combined_loader"}
        return {
            **_with_loop(checkpoint, {**loop, "state_dict": progress}),
            _KEY: {"world_size": runtime.data_parallel_world_size, "loaders": entries},
        }

    def load(self, checkpoint: dict[str, Any], trainer: pl.Trainer, runtime: Runtime) -> dict[str, Any]:
        """Put this rank's positions where Lightning looks for them.

        Args:
            checkpoint: What was saved, by this strategy or by another. It is not changed.
            trainer: The Trainer.
            runtime: The ranks.

        Raises:
            CheckpointMismatchError: A position can't be divided over this number of ranks.
        """
        loop = checkpoint.get("loops", {}).get("fit_loop")
        if loop is None or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        is_from_lightning = _KEY not in checkpoint
        saved = checkpoint.get(_KEY) or {"world_size": 1, "loaders": _entries_of_lightning(loop["state_dict"])}
        ends_reached = [is_at_end(state) for entry in saved["loaders"] for state in states_in(entry)]
        # If no loader has a state in our checkpoint, only the count of batches says whether the epoch is over.
        are_at_end = all(ends_reached) and (bool(ends_reached) or is_from_lightning)
        loop = _with_true_epochs(loop, are_at_end=are_at_end or is_from_lightning)
        batches = loop["epoch_loop.batch_progress"]
        self._epoch_is_over = _epoch_is_over(loop)
        self._is_mid_epoch = _is_within_epoch(loop)
        self._last_batch_was_done = (
            not self._epoch_is_over
            and batches["is_last_batch"]
            and batches["total"]["completed"] < batches["total"]["processed"]
        )
        states: list[Any] = []
        if self._is_mid_epoch or (are_at_end and saved["world_size"] == runtime.data_parallel_world_size):
            # Otherwise an epoch begins, which needs no states of another world size or of loaders with samples left.
            states = [state_of_own_rank(entry, saved["world_size"], runtime) for entry in saved["loaders"]]
        if are_at_end:
            always_load_loader_states(trainer.fit_loop)
        self._restored_states = states
        return _with_loop(checkpoint, {**loop, "state_dict": {**loop["state_dict"], "combined_loader": states}})


def warn_of_lost_positions(checkpoint: Mapping[str, Any]) -> None:
    """Warn that a strategy that does not read our positions begins the epoch's samples again.

    Lightning itself warns of loaders without a state.

    Args:
        checkpoint: A Trainer's checkpoint, saved by one of our strategies.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if (
        loop is not None
        and checkpoint.get(_KEY, {}).get("loaders")
        and _is_within_epoch(_with_true_epochs(loop, are_at_end=False))
    ):
        rank_zero_warn(
            "The checkpoint was saved within an epoch, and this strategy does not restore the positions that it holds "
            "of the data loaders, so they start over: the batches that are left of that epoch are its first ones "
            "again.\nResume with a strategy that `fsdp list` shows, or from the end of an epoch."
        )


def _warn_of_starting_over(combined: Any, *, has_states: bool) -> None:
    """Warn of loaders that don't resume an interrupted epoch at the sample where it was interrupted."""
    loaders_without_state = [describe_loader(loader) for loader in combined.flattened if not has_state(loader)]
    if loaders_without_state or not has_states:
        scope = f" ({', '.join(dict.fromkeys(loaders_without_state))})" if loaders_without_state else ""
        rank_zero_warn(
            f"The checkpoint was saved within an epoch and does not hold the position of the data loader{scope}, so "
            "the loader starts over: the batches that are left of that epoch are its first ones again, and its last "
            "ones are not seen. Resume from a checkpoint that was saved at the end of an epoch; or give "
            "the loader a position: leave the sampler to Lightning, or write state_dict() and load_state_dict()."
        )
    if not has_states:
        return
    for loader in combined.flattened:
        explanation = explain_unknown_order(loader)
        if explanation is not None:
            rank_zero_warn(f"The checkpoint was saved within an epoch. {explanation}")


def _epoch_is_over(loop: Mapping[str, Any]) -> bool:
    epochs = loop["epoch_progress"]["total"]
    return bool(epochs["ready"] == epochs["started"] == epochs["processed"])


def _is_within_epoch(loop: Mapping[str, Any]) -> bool:
    return not _epoch_is_over(loop) and not loop["epoch_loop.batch_progress"]["is_last_batch"]


def _states_of_loaders(loop: Any) -> list[Any]:
    """The states of the loaders that have one, without the batch that training has not finished yet."""
    batches = loop.epoch_loop.batch_progress.current
    unused = batches.ready - batches.processed
    combined = combined_loader(loop)
    states = []
    loaders = () if combined is None else combined.flattened
    for loader in loaders:
        position = position_of(loader)
        if has_state(loader):
            states.append(loader.state_dict() if position is None else position.state_dict(unused))
    return states


def _epochs_done(trainer: pl.Trainer) -> int:
    """Return the epoch that Lightning sets on samplers; ``trainer.current_epoch`` is one less at an epoch's end."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)


def _with_loop(checkpoint: Mapping[str, Any], loop: Mapping[str, Any]) -> dict[str, Any]:
    return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": loop}}


def _with_true_epochs(loop: Mapping[str, Any], *, are_at_end: bool) -> dict[str, Any]:
    """Return the progress of a fit with the true count of finished epochs, by which Lightning resumes.

    Args:
        loop: What Lightning saves.
        are_at_end: Whether the loaders have nothing left of their epoch, as far as is known.
    """
    epochs = {scope: dict(counts) for scope, counts in loop["epoch_progress"].items()}
    batches = loop["epoch_loop.batch_progress"]
    total = epochs["total"]
    if total["ready"] == total["started"] + 1:
        # The checkpoint was saved as an epoch began, while the count of batches was still that of the epoch before.
        for counts in epochs.values():
            counts["ready"] -= 1
    elif (
        total["ready"] == total["processed"]
        and batches["current"]["ready"]
        and not (batches["is_last_batch"] or are_at_end)
    ):
        # max_steps or a callback has ended the fit within an epoch, which Lightning has counted as done.
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = min(counts["completed"], counts["processed"])
    return {**loop, "epoch_progress": epochs}


def _recount_batches(loop: Any, combined: Any) -> None:
    """Convert Lightning's count of an epoch's batches, which is per rank, to this number of ranks."""
    progress = loop.epoch_loop.batch_progress
    max_batches = loop.max_batches
    batch_was_done = loop.epoch_loop.restarted_on_train_batch_end
    counted_batches = progress.current.completed + (1 if batch_was_done else 0)  # after these, Lightning would continue
    position = position_of(deciding_loader(combined))
    if progress.is_last_batch and max_batches == math.inf:
        if batch_was_done:  # Lightning does not start the count again where the length is unknown
            _add_batches(progress.current, -counted_batches)
        return
    if progress.is_last_batch:
        true_batches = max_batches
    elif position is not None and position.restored is not None:
        true_batches = position.batches_after_samples(position.restored, max_batches)
    else:
        return
    for counts in (progress.total, progress.current):
        _add_batches(counts, true_batches - counted_batches)


def _add_batches(counts: Any, batches: int) -> None:
    """Add to each of Lightning's counts of batches: of those that are ready, started, processed and completed."""
    for moment in ("ready", "started", "processed", "completed"):
        setattr(counts, moment, getattr(counts, moment) + batches)


def _entries_of_lightning(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries for a checkpoint of Lightning's own strategies, which holds the states of rank 0."""
    return [
        {"loader": "the data loader", "ranks": [state_of_loader]}
        for state_of_loader in state.get("combined_loader", [])
    ]
