"""Exact resume under the Trainer: positions of loaders, random states, and gradients accumulated for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from fsdp_core.lightning.checkpoints.attempts import Attempts
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.loaders.trainer_loaders import TrainingLoaders
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.held_gradients import describe_gradients, gradients_of_rank
from fsdp_core.state.random_state import random_state, set_random_state, state_of_rank

__all__ = ["KEY", "ExactResume"]

#: The key of a Trainer's checkpoint that holds this module's state.
KEY = "fsdp_core"


class ExactResume(Feature):
    """Lets a run that resumes from a checkpoint do what the run that saved it did next.

    The random state is restored after a validation, so that training draws the same numbers with and without it: on
    resuming, Lightning skips the validation that would follow the batch after which a checkpoint was saved.

    The random state of a checkpoint is set twice. First before the loaders are iterated, since an iterator draws the
    seed of its workers and possibly of its order. Then after everything that the beginning of a fit draws, right before
    the first thing that the saving run did next as well.

    Args:
        runtime: The ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loaders = TrainingLoaders()
        #: What has led to this state.
        self._attempts = Attempts()
        self._to_restore: Mapping[str, Any] | None = None
        self._gradients: Mapping[str, Any] | None = None
        self._at_iterators = False
        self._after_iterators: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        self._waiting: list[Optimizer] = []
        self._followed: list[tuple[Any, str]] = []

    # -- what is saved ---------------------------------------------------------------------------------------------

    def state(self, sharded: Sharded) -> dict[str, Any]:
        """Return what to save with the model and optimizers. All ranks must call it.

        The generators of all ranks are in it on rank 0, which writes them; on the others, their own.
        """
        own_state = random_state(self._runtime) if self._before_validation is None else self._before_validation
        by_rank = self._runtime.gather_objects_to(own_state)
        states = [own_state] if by_rank is None else self._runtime.by_data_parallel_rank(by_rank)
        state: dict[str, Any] = {
            "ranks": [{"random": rank_state} for rank_state in states],
            "attempts": self._attempts.state(),
        }
        gradients = describe_gradients(sharded.accumulated_gradients(), self._runtime) if self._waiting else None
        return state if gradients is None else {**state, "gradients": gradients}

    def with_positions(self, checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
        """Lightning's checkpoint dict with the positions of all ranks' training loaders. All ranks must call it."""
        return self._loaders.save(checkpoint, trainer, self._runtime)

    def take_positions(self, saved: dict[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
        """A saved checkpoint dict with this rank's positions where Lightning looks for them."""
        return self._loaders.load(saved, trainer, self._runtime)

    def take(self, state: Mapping[str, Any] | None, trainer: pl.Trainer) -> None:
        """Store what :meth:`state` returned, to restore it later, once Lightning has restored its loops.

        Args:
            state: ``None`` if the checkpoint holds none.
            trainer: The Trainer.
        """
        self._loaders.progress_restored(trainer)
        self._attempts.take(state)
        self._to_restore = self._gradients = None
        if state is not None:
            self._to_restore = state_of_rank([of_rank["random"] for of_rank in state["ranks"]], self._runtime)
            self._gradients = state.get("gradients")

    # -- when gradients wait ---------------------------------------------------------------------------------------

    def on_backward(self, optimizers: Sequence[Optimizer]) -> None:
        """Record that a backward pass has accumulated gradients for these optimizers."""
        self._waiting = list(optimizers)

    def on_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has used its gradients."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not optimizer]

    # -- when random numbers are set -------------------------------------------------------------------------------

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        """Hook into the Trainer's loops where they iterate their loaders and validate, until the stage ends."""
        if fitting:
            self._leave_loops()
            self._waiting = []
            loop = trainer.fit_loop
            validation = loop.epoch_loop.val_loop
            self._around(loop, "setup_data", self._iterating)
            self._around(validation, "run", self._validating)
            self._around(validation, "increment_progress_to_evaluation_end", self._validating)

    def prepare_loader(self, loader: object, trainer: pl.Trainer) -> object:
        """Track a loader that Lightning has prepared, or copy one whose position is that of another stage."""
        if not trainer.training:
            return self._loaders.prepare_other(loader)
        loader = self._loaders.prepare(loader, trainer)
        self._before_iterators()
        return loader

    def train_start(self, trainer: pl.Trainer, sharded: Sharded) -> None:
        """Restore gradients, which Lightning has zeroed as the fit began; then positions, then the random state."""
        gradients = self._gradients
        self._gradients = None
        if gradients is not None:
            sharded.restore_gradients(gradients_of_rank(gradients, self._runtime), gradients["reduced"])
            self.on_backward(trainer.optimizers)
        self._before_iterators()
        self._loaders.start(trainer)
        self._before_first_batch(trainer)
        self._attempts.begin(trainer)

    def teardown(self, trainer: pl.Trainer | None) -> None:
        """Record the positions of loaders, and remove the hooks from the loops."""
        if trainer is not None:
            self._loaders.finish(trainer)
            self._leave_loops()

    def _leave_loops(self) -> None:
        for loop, name in self._followed:
            loop.__dict__.pop(name, None)
        self._followed = []

    def _before_iterators(self) -> None:
        """Set the random state that the iterators of the training loaders draw from.

        To be called whenever they may be created next; possibly several times before the first batch.
        """
        if self._to_restore is not None:
            set_random_state(self._to_restore, self._runtime)
            self._at_iterators = True

    def _before_first_batch(self, trainer: pl.Trainer) -> None:
        """Set the random state that the first batch draws from, or what remains to be done of the last epoch.

        To be called right after iterators may have been created for the last time, with nothing else in between.
        """
        if self._to_restore is None:
            return
        self._note_iterators()
        loop = trainer.fit_loop
        epoch_is_over = loop.epoch_loop.batch_progress.is_last_batch
        # Lightning runs the end of an epoch again if it was saved in the validation after the last batch, and iterates
        # its loaders again after that; otherwise the next epoch uses the existing iterators
        goes_through_its_end = loop.restarted_mid_epoch and loop.epoch_loop.restarted_on_last
        if epoch_is_over and not goes_through_its_end and self._after_iterators is not None:
            set_random_state(self._after_iterators, self._runtime)
        else:
            set_random_state(self._to_restore, self._runtime)
        self._to_restore = self._after_iterators = None

    def _around(self, loop: Any, name: str, call: Callable[[Callable[..., Any]], Any]) -> None:
        method = getattr(loop, name)
        setattr(loop, name, wraps(method)(lambda: call(method)))
        self._followed.append((loop, name))

    def _iterating(self, setup_data: Callable[[], None]) -> None:
        setup_data()
        self._note_iterators()

    def _note_iterators(self) -> None:
        """Record the random state after iterators were created, if there are new ones."""
        if self._to_restore is not None and self._at_iterators:
            current = random_state(self._runtime)
            if not torch.equal(current["torch"], self._to_restore["torch"]):
                self._after_iterators = current
            self._at_iterators = False

    def _validating(self, run: Callable[[], Any]) -> Any:
        if self._before_validation is not None:
            return run()
        self._before_validation = random_state(self._runtime)
        try:
            return run()
        finally:
            set_random_state(self._before_validation, self._runtime)
            self._before_validation = None
