"""Exact resume under the Trainer: positions of loaders, random states, and gradients accumulated for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from fsdp_core.lightning.checkpoints.attempts import Attempts
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.loaders.trainer_loaders import TrainingLoaders
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.held_gradients import describe_gradients, gradients_of_rank
from fsdp_core.state.random_state import random_state, set_random_state, state_of_rank

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["EXACT_RESUME_KEY", "ExactResume"]

#: The key of a Trainer's checkpoint under which :meth:`ExactResume.state` is saved.
EXACT_RESUME_KEY = "fsdp_core"


class ExactResume(Feature):
    """Lets a run that resumes from a checkpoint do what the run that saved it did next.

    A validation leaves the random state as it was: if a checkpoint was saved between a batch and its validation,
    Lightning skips that validation on resuming, and training must draw the same numbers without it.

    The random state of a checkpoint is set twice. First before iterators of the loaders are created, since an iterator
    draws the seed of its workers and possibly of its order. Then again after everything that draws as a fit begins,
    right before the first batch, which was also what the saving run did next.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self._loaders = TrainingLoaders()
        self._attempts = Attempts()
        #: This rank's random state in the checkpoint; ``None`` from the first batch on.
        self._saved_random_state: Mapping[str, Any] | None = None
        #: The accumulated gradients in the checkpoint; ``None`` once they are restored.
        self._saved_gradients: Mapping[str, Any] | None = None
        #: How many tokens they are of, by optimizer.
        self._saved_tokens: Sequence[Mapping[str, float] | None] = ()
        #: Whether the random state was set, and iterators that draw from it may have been created since.
        self._is_set_for_iterators = False
        #: The random state that these iterators have left; ``None`` if there were none.
        self._state_after_iterators: dict[str, Any] | None = None
        self._state_before_validation: dict[str, Any] | None = None
        #: The optimizers that have not stepped since the last backward pass.
        self._optimizers_with_gradients: list[Optimizer] = []
        #: Each loop of the Trainer that has a wrapper in place of a method, with the method's name.
        self._wrapped_methods: list[tuple[Any, str]] = []

    # -- what is saved ---------------------------------------------------------------------------------------------

    def state(self, sharded: Sharded) -> dict[str, Any]:
        """Return what to save with the model and optimizers. All ranks must call it.

        On rank 0, which writes it, it has the random states of all ranks; elsewhere, the rank's own.
        """
        own_state = self._state_before_validation
        if own_state is None:
            own_state = random_state(self._strategy.runtime)
        states_by_rank = self._strategy.runtime.gather_objects_to(own_state)
        states = [own_state] if states_by_rank is None else self._strategy.runtime.by_data_parallel_rank(states_by_rank)
        state: dict[str, Any] = {
            "ranks": [{"random": rank_state} for rank_state in states],
            "attempts": self._attempts.state(),
        }
        if self._optimizers_with_gradients:
            gradients = describe_gradients(sharded.accumulated_gradients(), self._strategy.runtime)
            if gradients is not None:
                state["gradients"] = gradients
                state["tokens"] = self._strategy.token_means.state(self._strategy.optimizers)
        return state

    def add_positions(self, checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
        """Lightning's checkpoint dict with the positions of all ranks' training loaders. All ranks must call it."""
        return self._loaders.save(checkpoint, trainer, self._strategy.runtime)

    def place_own_positions(self, saved: dict[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
        """A saved checkpoint dict with this rank's positions where Lightning looks for them."""
        return self._loaders.load(saved, trainer, self._strategy.runtime)

    def load_state(self, state: Mapping[str, Any] | None, trainer: pl.Trainer) -> None:
        """Store what :meth:`state` returned, to restore it later, once Lightning has restored its loops.

        Args:
            state: ``None`` if the checkpoint holds none.
            trainer: The Trainer.
        """
        self._loaders.begin_epoch_if_due(trainer)
        self._attempts.continue_from(state)
        self._saved_random_state = self._saved_gradients = None
        if state is not None:
            random_states = [rank_state["random"] for rank_state in state["ranks"]]
            self._saved_random_state = state_of_rank(random_states, self._strategy.runtime)
            self._saved_gradients = state.get("gradients")
            self._saved_tokens = state.get("tokens", ())

    # -- accumulated gradients -------------------------------------------------------------------------------------

    def after_backward(self, optimizers: Sequence[Optimizer]) -> None:
        """Record that a backward pass has accumulated gradients for these optimizers."""
        self._optimizers_with_gradients = list(optimizers)

    def after_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has used its gradients."""
        remaining = [other for other in self._optimizers_with_gradients if other is not optimizer]
        self._optimizers_with_gradients = remaining

    # -- when random numbers are set -------------------------------------------------------------------------------

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        """Hook into the Trainer's loops where they iterate their loaders and validate, until the stage ends."""
        if fitting:
            self._unwrap_methods()
            self._optimizers_with_gradients = []
            loop = trainer.fit_loop
            validation = loop.epoch_loop.val_loop
            self._wrap_method(loop, "setup_data", self._set_up_data)  # which creates iterators
            self._wrap_method(validation, "run", self._keep_random_state)
            # called in place of a validation that is skipped on resuming, and sets up its loaders
            self._wrap_method(validation, "increment_progress_to_evaluation_end", self._keep_random_state)

    def prepare_loader(self, loader: object, trainer: pl.Trainer) -> object:
        """Track a loader that Lightning has prepared for training; for another stage, copy one that is tracked."""
        if not trainer.training:
            return self._loaders.prepare_other(loader)
        loader = self._loaders.prepare(loader, trainer)
        self._set_state_for_iterators()
        return loader

    def train_start(self, trainer: pl.Trainer, sharded: Sharded) -> None:
        """Restore gradients, which Lightning has zeroed as the fit began; then positions, then the random state."""
        gradients = self._saved_gradients
        self._saved_gradients = None
        if gradients is not None:
            sharded.restore_gradients(gradients_of_rank(gradients, self._strategy.runtime), gradients["reduced"])
            self._strategy.token_means.load_state(self._strategy.optimizers, self._saved_tokens)
            self.after_backward(trainer.optimizers)
        self._set_state_for_iterators()
        self._loaders.start(trainer)
        self._set_state_for_first_batch(trainer)
        self._attempts.begin(trainer)

    def teardown(self, trainer: pl.Trainer | None) -> None:
        """Record the positions of loaders, and remove the hooks from the loops."""
        if trainer is not None:
            self._loaders.finish(trainer)
            self._unwrap_methods()

    def _unwrap_methods(self) -> None:
        for loop, name in self._wrapped_methods:
            loop.__dict__.pop(name, None)
        self._wrapped_methods = []

    def _set_state_for_iterators(self) -> None:
        """Set the random state that the iterators of the training loaders draw from.

        To be called whenever they may be created next; possibly several times before the first batch.
        """
        if self._saved_random_state is not None:
            set_random_state(self._saved_random_state, self._strategy.runtime)
            self._is_set_for_iterators = True

    def _set_state_for_first_batch(self, trainer: pl.Trainer) -> None:
        """Set the random state for the first batch, or for the end of an epoch that Lightning runs again.

        To be called right after iterators may have been created for the last time, with nothing else in between.
        """
        if self._saved_random_state is None:
            return
        self._record_state_after_iterators()
        loop = trainer.fit_loop
        is_epoch_over = loop.epoch_loop.batch_progress.is_last_batch
        # Lightning runs the end of an epoch again if the checkpoint was saved in the validation after the last batch,
        # and then creates new iterators
        repeats_end_of_epoch = loop.restarted_mid_epoch and loop.epoch_loop.restarted_on_last
        begins_epoch = is_epoch_over and not repeats_end_of_epoch
        next_state = self._saved_random_state
        if begins_epoch and self._state_after_iterators is not None:
            next_state = self._state_after_iterators  # the new epoch uses the iterators that have left it
        set_random_state(next_state, self._strategy.runtime)
        self._saved_random_state = self._state_after_iterators = None

    def _wrap_method(self, loop: Any, name: str, wrapper: Callable[[Callable[..., Any]], Any]) -> None:
        """Make a loop call ``wrapper(method)`` instead of its method; the wrapper is to call the method."""
        method = getattr(loop, name)
        setattr(loop, name, wraps(method)(lambda: wrapper(method)))
        self._wrapped_methods.append((loop, name))

    def _set_up_data(self, setup_data: Callable[[], None]) -> None:
        setup_data()
        self._record_state_after_iterators()

    def _record_state_after_iterators(self) -> None:
        """Record the random state that iterators have left, if any were created since the state was set for them."""
        if self._saved_random_state is not None and self._is_set_for_iterators:
            current = random_state(self._strategy.runtime)
            has_drawn = not torch.equal(current["torch"], self._saved_random_state["torch"])
            if has_drawn:  # an iterator's seed
                self._state_after_iterators = current
            self._is_set_for_iterators = False

    def _keep_random_state(self, validate: Callable[[], Any]) -> Any:
        """Run a validation, and set the random state to what it was before."""
        if self._state_before_validation is not None:  # one of the two wrapped methods calls the other
            return validate()
        self._state_before_validation = random_state(self._strategy.runtime)
        try:
            return validate()
        finally:
            set_random_state(self._state_before_validation, self._strategy.runtime)
            self._state_before_validation = None
