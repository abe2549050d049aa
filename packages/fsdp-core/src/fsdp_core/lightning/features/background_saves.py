"""Writes in the background of a fit, and what must wait for them: names, links and removals of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.lightning.checkpoints.deferred_copies import finish_copies_after
from fsdp_core.lightning.checkpoints.model_checkpoint import treat_pending_saves_as_done
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.runtime import Runtime

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["BackgroundSaves"]


class BackgroundSaves(Feature):
    """The saves of a fit.

    Args:
        strategy: The strategy.

    Attributes:
        writer: Writes in the background of a fit; ``None`` without training, where a save returns once all is written.
        will_exist: By path, whether a checkpoint exists once all pending saves are done.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self.writer: AsyncSaves | None = None
        self.will_exist: dict[str, bool] = {}

    def setup(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        self.writer = self._strategy.async_saves if fitting else None
        if self.writer is not None or (fitting and self._strategy.scattered_save):
            treat_pending_saves_as_done(trainer.checkpoint_callbacks)

    def before_step(self) -> None:
        """Raise on all ranks what a save has failed with since the last step."""
        if self.writer is not None:
            self.writer.step()

    def before_optimizer_step(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Wrap an optimizer's closure: at its end the last save is copied, since the optimizer then writes."""
        return closure if self.writer is None else finish_copies_after(closure, self.writer, optimizer)

    def before_save(self, path: str) -> None:
        """Wait for the save before, whose memory this one needs."""
        if self.writer is not None:
            self.writer.wait()
            self.will_exist = {path: True}

    def run_in_order(self, description: str, job: Callable[[], None], will_exist: Mapping[str, bool]) -> None:
        """Run a job on rank 0, after all pending saves. All ranks must call it.

        With scattered saves every rank runs it, since each may see other files: first one rank of each host, which does
        the job for those that see the same, and then the others.

        Args:
            description: What the job does, for error messages.
            job: The job.
            will_exist: By path, whether a checkpoint is there once the job is done.
        """
        scattered = self._strategy.scattered_save

        def run_job(ranks: Runtime) -> None:
            is_first_rank = (ranks.local_rank if scattered else ranks.rank) == 0
            run_on_all(ranks, description, lambda: job() if is_first_rank else None)
            if scattered:
                run_on_all(ranks, description, lambda: None if is_first_rank else job())

        if self.writer is None:
            run_job(self._strategy.runtime)
        else:
            self.will_exist.update(will_exist)
            self.writer.run(description, run_job)

    def close(self) -> None:
        """Wait for what is pending as a stage ends, once everything else has ended.

        Raises:
            CheckpointError: A checkpoint could not be saved.
        """
        writer = self.writer
        self.writer = None  # also if closing raises
        if writer is not None:
            writer.close()
