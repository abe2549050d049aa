"""Ends a fit after a checkpoint, at the same batch on all ranks, when a signal has told any one of them to end.

Lightning saves inside its signal handler, at an arbitrary point of one rank, and broadcasts there. Here a handler sets
a flag and nothing else. After each batch one collective adds up the flags of all ranks. It takes the place of the
broadcast that Lightning makes before each batch, and also compares two more things. One is whether the epoch is over:
if the loader of a rank ends earlier than the others', an error names the rank at that batch, where the others would
wait for it otherwise. The other is learning rates and the like, which a scheduler or a callback may have set
differently.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.global_batch import keeps_global_batch
from fsdp_core.lightning.launchers.requeueing import requeue, requeue_signal_of
from fsdp_core.lightning.private import (
    around_each_batch,
    instead_of_signal_handlers,
    is_accumulating,
    note_sigterm,
    path_to_resume_from,
)
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.agreement.same_optimizers import are_equal, check_same_rates, digest_of_rates

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["Preemption", "Signals"]


class Signals:
    """The signals that ask this rank to end: SIGTERM and, under SLURM, the one that announces a requeue.

    Args:
        strategy: The strategy.

    Attributes:
        received: The signal that has come to this rank; ``None`` if none has.
        agreed: The signal that has come to any rank, as of the last call of :meth:`agree`; 0 if none has.
    """

    def __init__(self, strategy: ShardedTrainerStrategy | ShardedFabricStrategy) -> None:
        self._strategy = strategy
        self.received: int | None = None
        self.agreed = 0
        self._are_handlers_registered = False  # by told_to_end(), under Fabric

    def requeue_signal(self) -> int | None:
        """The signal by which SLURM announces the end of a job that is to be queued again; ``None`` elsewhere."""
        return requeue_signal_of(self._strategy.cluster_environment)

    def register(self, on_signal: Callable[[int], None] | None = None) -> None:
        """Note these signals from now on, and call the handlers that there are. Only the main thread gets signals.

        Args:
            on_signal: Called with the signal, in its handler.
        """
        for signum in filter(None, (signal.SIGTERM, self.requeue_signal())):
            former_handler = signal.getsignal(signum)
            # a handler of the user's for SLURM's signal replaces ours, as it replaces Lightning's
            if signum == signal.SIGTERM or former_handler in (signal.SIG_DFL, None):
                users_handler = former_handler if callable(former_handler) else None
                signal.signal(signum, self._make_handler(users_handler, on_signal))

    def _make_handler(
        self, users_handler: Callable[..., Any] | None, on_signal: Callable[[int], None] | None
    ) -> Callable[[int, FrameType | None], None]:
        def note_signal(signum: int, frame: FrameType | None) -> None:
            self.received = signum
            if users_handler is not None:
                users_handler(signum, frame)
            if on_signal is not None:
                on_signal(signum)

        return note_signal

    def told_to_end(self) -> bool:
        """Whether any rank was told to end, as of now. The signals are noted from the first call on.

        All ranks must call it.
        """
        if not self._are_handlers_registered:
            self._are_handlers_registered = True
            if isinstance(self._strategy.runtime, ProcessGroupRuntime):  # ranks that are threads get no signals
                self.register()
        self.agree()
        return bool(self.agreed)

    def requeue_agreed(self) -> None:
        """Let SLURM queue this job again, if its signal has announced that. Called once a checkpoint is complete."""
        if self.agreed and self.agreed == self.requeue_signal() and self._strategy.is_global_zero:
            requeue()

    def agree(self, *counts: int) -> list[int]:
        """Set :attr:`agreed` by the signals that have come to any rank. All ranks must call it.

        Args:
            *counts: Something else to be added up.

        Returns:
            The sums of ``counts`` over all ranks.
        """
        requeue_signal = self.requeue_signal()
        is_signalled = self.received is not None
        asks_for_requeue = is_signalled and self.received == requeue_signal
        flags = [int(is_signalled), int(asks_for_requeue), *counts]
        signalled_ranks, requeueing_ranks, *sums = self._strategy.runtime.total(flags)
        if signalled_ranks:
            self.agreed = requeue_signal if requeueing_ranks and requeue_signal is not None else signal.SIGTERM
        return sums


class Preemption(Feature):
    """The end of a Trainer's stages by a signal.

    Args:
        strategy: The strategy. Nothing is done for ranks that are threads: only the main thread gets signals.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self._signals = Signals(strategy)
        #: Whether a signal or an exception has ended the stage, so that no warning of an unheeded signal is due.
        self._has_ended_early = False

    def setup(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        """Take over the signals of a stage, which Lightning is about to register. All ranks must call it."""
        if not isinstance(self._strategy.runtime, ProcessGroupRuntime):
            return
        self._signals.received = None
        self._signals.agreed = 0
        self._has_ended_early = False
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            on_signal = None if fitting else self._end_at_once
            instead_of_signal_handlers(trainer, lambda: self._signals.register(on_signal))
        if fitting:
            around_each_batch(
                trainer, lambda: self._end_together(trainer), lambda is_last: self._agree(trainer, is_last)
            )

    def fail(self) -> None:
        """Warn of no signal any more: an exception ends the stage."""
        self._has_ended_early = True

    def teardown(self, trainer: pl.Trainer | None) -> None:
        """Warn of a signal that came during the last batch of a fit: the fit has ended as planned, in spite of it."""
        signal_received = self._signals.received
        if signal_received is not None and not self._has_ended_early:
            warnings.warn(
                f"{self._strategy.strategy_name}: {signal.Signals(signal_received).name} came during the last batch, "
                "and the fit has ended as planned. Send it again to end what the script does next.",
                stacklevel=2,
            )
        self._signals.received = None

    def _end_at_once(self, signum: int) -> None:
        """End a stage that has nothing to save."""
        self._has_ended_early = True
        raise SIGTERMException(128 + signum)

    def _agree(self, trainer: pl.Trainer, is_last: bool) -> None:
        """Learn whether any rank was told to end, and check what must be the same on all ranks after each batch.

        Raises:
            ShardingError: On all ranks: the epoch is over on some, or their optimizers' rates differ, or what they have
                written to gathered parameters.
        """
        strategy, runtime = self._strategy, self._strategy.runtime
        written_values = strategy.sharded.written_values
        values = written_values.take()
        # one digest of both, so that one collective compares all; which of them differs is found out if it does
        digest = digest_of_rates(strategy.optimizers) ^ written_values.digest(values, runtime.rank)
        ranks_at_end, total, sum_of_squares = self._signals.agree(is_last, digest, digest**2)
        if not are_equal(total, sum_of_squares, runtime.world_size):
            batch = trainer.fit_loop.epoch_loop.batch_idx
            epoch = trainer.current_epoch
            check_same_rates(runtime, strategy.optimizers, f"after batch {batch} of epoch {epoch}")
            written_values.check_same(values, runtime, f"training_step(), in batch {batch} of epoch {epoch},")
        if 0 < ranks_at_end < runtime.world_size:
            is_last_by_rank = runtime.gather_objects(is_last)
            ended_ranks = ", ".join(str(rank) for rank, has_ended in enumerate(is_last_by_rank) if has_ended)
            raise ShardingError(
                f"{strategy.strategy_name}: the epoch is over on rank {ended_ranks} after batch "
                f"{trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}, and goes on elsewhere. All "
                "ranks must take as many steps: each step needs the shards of all.\n"
                "Give each rank as many batches: datasets of the same length, or Trainer(limit_train_batches=N) with "
                "what the shortest has."
            )

    def _end_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks, after a checkpoint, if any of them was told to end. Called before each batch.

        With a ``GlobalBatch`` of a size, an accumulation that has begun is completed first: what is left of its batch
        may not be divisible over another number of ranks.
        """
        agreed_signal = self._signals.agreed
        if agreed_signal and not (keeps_global_batch(trainer) and is_accumulating(trainer)):
            self._has_ended_early = True
            note_sigterm(trainer)
            self._save(trainer, agreed_signal)
            # Rank 0's exit status is enough. If another process ended with a status, Lightning's launcher would kill
            # the rest.
            raise SIGTERMException(128 + agreed_signal if self._strategy.is_global_zero else 0)

    def _save(self, trainer: pl.Trainer, agreed_signal: int) -> None:
        """Save a checkpoint to resume from, unless a callback saves on the exception that ends the fit."""
        strategy, name = self._strategy, signal.Signals(agreed_signal).name
        requeues = agreed_signal == self._signals.requeue_signal()
        if not requeues and not trainer.checkpoint_callbacks:
            rank_zero_warn(
                f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}, and nothing is "
                "saved: the Trainer has no checkpoint callback. Leave enable_checkpointing=False out to have one."
            )
            return
        if not requeues and any(_saves_on_exception(callback) for callback in trainer.checkpoint_callbacks):
            rank_zero_info(f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}.")
            return
        path = strategy.broadcast(path_to_resume_from(trainer))
        trainer.save_checkpoint(path)
        strategy.wait_for_saves()
        rank_zero_info(
            f"{strategy.strategy_name}: {name} ends the fit after step {trainer.global_step}, which {path} holds. "
            "Resume it with trainer.fit(module, ckpt_path='hpc')."
        )
        if requeues and strategy.is_global_zero:
            requeue()


def _saves_on_exception(callback: object) -> bool:
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and bool(getattr(callback, "save_on_exception", False))
    )
