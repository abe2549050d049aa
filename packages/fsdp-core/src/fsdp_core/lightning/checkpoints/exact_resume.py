"""Exact resume under the Trainer: each rank's random state, and gradients accumulated for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from fsdp_core.lightning.checkpoints.attempts import Attempts
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.held_gradients import described, of_this_rank
from fsdp_core.state.random_state import random_state, set_random_state, state_of_rank

__all__ = ["KEY", "ExactResume"]

#: The key of a Trainer's checkpoint that holds this module's state.
KEY = "fsdp_core"


class ExactResume:
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
        #: What has led to this state.
        self.attempts = Attempts()
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
        mine = random_state(self._runtime) if self._before_validation is None else self._before_validation
        by_rank = self._runtime.gather_objects_to(mine)
        of_ranks = [mine] if by_rank is None else self._runtime.by_data_parallel_rank(by_rank)
        state: dict[str, Any] = {
            "ranks": [{"random": one} for one in of_ranks],
            "attempts": self.attempts.state(),
        }
        gradients = described(sharded.accumulated_gradients(), self._runtime) if self._waiting else None
        return state if gradients is None else {**state, "gradients": gradients}

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Store what :meth:`state` returned, to restore it later.

        Args:
            state: ``None`` if the checkpoint holds none.
        """
        self.attempts.take(state)
        self._to_restore = self._gradients = None
        if state is not None:
            self._to_restore = state_of_rank([of_rank["random"] for of_rank in state["ranks"]], self._runtime)
            self._gradients = state.get("gradients")

    def restore_gradients(self, sharded: Sharded, optimizers: Sequence[Optimizer]) -> None:
        """Restore accumulated gradients. All ranks must call it, after Lightning has zeroed them as a fit begins."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            sharded.restore_gradients(of_this_rank(gradients, self._runtime), gradients["reduced"])
            self.on_backward(optimizers)

    # -- when gradients wait ---------------------------------------------------------------------------------------

    def on_backward(self, optimizers: Sequence[Optimizer]) -> None:
        """Record that a backward pass has accumulated gradients for these optimizers."""
        self._waiting = list(optimizers)

    def on_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has used its gradients."""
        self._waiting = [one for one in self._waiting if one is not optimizer]

    # -- when random numbers are set -------------------------------------------------------------------------------

    def follow(self, trainer: pl.Trainer) -> None:
        """Hook into the Trainer's loops where they iterate their loaders and validate, until :meth:`leave`."""
        self.leave()
        self._waiting = []
        loop = trainer.fit_loop
        validation = loop.epoch_loop.val_loop
        self._around(loop, "setup_data", self._iterating)
        self._around(validation, "run", self._validating)
        self._around(validation, "increment_progress_to_evaluation_end", self._validating)

    def leave(self) -> None:
        """Remove the hooks from the Trainer's loops."""
        for loop, name in self._followed:
            loop.__dict__.pop(name, None)
        self._followed = []

    def before_iterators(self) -> None:
        """Set the random state that the iterators of the training loaders draw from.

        To be called whenever they may be created next; possibly several times before the first batch.
        """
        if self._to_restore is not None:
            set_random_state(self._to_restore, self._runtime)
            self._at_iterators = True

    def before_first_batch(self, trainer: pl.Trainer) -> None:
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
            now = random_state(self._runtime)
            if not torch.equal(now["torch"], self._to_restore["torch"]):
                self._after_iterators = now
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
