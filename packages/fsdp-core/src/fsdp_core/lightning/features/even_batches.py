"""Stages without training whose loaders have more batches on some ranks than on others.

Every forward pass needs the shards of all ranks, so all must take as many steps. In validation and tests, whose results
are averaged, other numbers raise. In prediction Lightning divides the samples without repeating any, so that ranks
differ by a batch wherever the number of samples is not a multiple: those with fewer run their last batch once more, and
what it returns is dropped. Loaders without a length are compared before each of their batches. In training, the ranks
compare after each batch: see :mod:`fsdp_core.lightning.features.preemption`.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.private import around_predictions, lengths_of_predictions
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.agreement.same_optimizers import are_equal

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["EvenBatches"]


class EvenBatches:
    """Compares the ranks' numbers of batches, and lets a rank with fewer in a prediction repeat its last one.

    The rank takes these further steps because the others need its shards. If all loaders have a length, the number of
    further steps is known before the first step. If not, the ranks compare before each batch which loader their next
    batch comes from.

    Args:
        strategy: The strategy, whose ``predict_step`` runs a batch again.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy: Any = strategy
        #: Whether this rank may have to repeat its last batch.
        self._may_repeat = False
        #: Whether the user was told, in this prediction, that ranks repeat batches.
        self._has_reported = False
        #: The loader of this rank's last batch, and what ``predict_step`` was called with for it.
        self._last_loader_idx: int | None = None
        self._last_arguments: tuple[Any, ...] = ()

    def check(self, stage: str) -> None:
        """Raise on every rank if the loaders of a validation or a test differ in their numbers of batches.

        All ranks must call it.

        Args:
            stage: ``"val"`` or ``"test"``, as in ``limit_val_batches``.

        Raises:
            ShardingError: Two ranks differ. The message gives the numbers by rank.
        """
        trainer = self._strategy.lightning_module.trainer
        batches = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
        counts_by_rank = _gather_if_different(self._strategy.runtime, batches)
        if counts_by_rank is None:
            return
        verb = "validates" if stage == "val" else "tests"
        difference = _describe_counts(counts_by_rank, verb)
        raise ShardingError(
            f"{self._strategy.strategy_name}: {difference}. All ranks must take as many steps: "
            "each needs the shards of all, and what is logged is averaged over them.\n"
            "Give each rank as many batches: datasets of the same length, whose sampler is left to Lightning, or "
            f"Trainer(limit_{stage}_batches=N) with what the shortest has."
        )

    def begin_prediction(self) -> None:
        """Compare the numbers of batches, and let this rank run those that it lacks. All ranks must call it.

        Raises:
            ShardingError: A rank lacks batches of a loader and can't run its last one again.
        """
        runtime = self._strategy.runtime
        trainer = self._strategy.lightning_module.trainer
        batches = lengths_of_predictions(trainer)
        counts_by_rank = _gather_if_different(runtime, batches)
        around_predictions(trainer)  # removes what an earlier prediction has set
        self._may_repeat = self._has_reported = False
        self._last_loader_idx = None
        self._last_arguments = ()
        if counts_by_rank is not None and len(set(map(len, counts_by_rank))) > 1:
            difference = _describe_counts(counts_by_rank, "predicts")
            raise ShardingError(
                f"{self._strategy.strategy_name}: {difference}. All ranks must take as many steps: each needs the "
                "shards of all.\nGive each rank the same loaders."
            )
        module: Any = trainer.lightning_module
        takes_iterator = "dataloader_iter" in inspect.signature(module.predict_step).parameters
        has_unknown_length = any(math.inf in counts for counts in counts_by_rank or [batches])
        if has_unknown_length:
            if runtime.world_size > 1 and not takes_iterator:
                self._compare_before_each_batch(trainer, loader_count=len(batches))
        elif counts_by_rank is not None:
            self._repeat_last_batches(trainer, batches, counts_by_rank, takes_iterator=takes_iterator)

    def _compare_before_each_batch(self, trainer: pl.Trainer, *, loader_count: int) -> None:
        """Let ranks find out as they predict who has fewer batches, where a loader has no length."""
        self._may_repeat = True
        around_predictions(
            trainer,
            before=lambda loader_idx: self._catch_up(loader_count, loader_idx),
            end=lambda: self._catch_up(loader_count, None),
        )

    def _repeat_last_batches(
        self,
        trainer: pl.Trainer,
        batches: Sequence[float],
        counts_by_rank: Sequence[Sequence[float]],
        *,
        takes_iterator: bool,
    ) -> None:
        """Let this rank run the last batch of each loader again until it has run as many as any rank.

        Args:
            trainer: The Trainer.
            batches: By loader, how many batches this rank has.
            counts_by_rank: The same of every rank.
            takes_iterator: Whether ``predict_step`` takes the loader's iterator in place of a batch.
        """
        name = self._strategy.strategy_name
        difference = _describe_counts(counts_by_rank, "predicts")
        largest_counts = [max(counts) for counts in zip(*counts_by_rank, strict=True)]
        empty_ranks = [rank for rank, counts in enumerate(counts_by_rank) if 0 in counts and counts != largest_counts]
        if empty_ranks:
            raise ShardingError(
                f"{name}: {difference}. All ranks must take as many steps: each needs the shards of all, and rank "
                f"{', '.join(map(str, empty_ranks))} has no batch that it could run again.\n"
                "Give each rank one batch at least: use fewer ranks, or smaller batches."
            )
        if takes_iterator:
            raise ShardingError(
                f"{name}: {difference}. All ranks must take as many steps: each needs the shards of all. "
                "predict_step(dataloader_iter) takes batches from the loader itself, so that none can be run again.\n"
                "Write predict_step(batch, batch_idx), or give each rank as many batches."
            )
        rank_zero_info(f"{name}: {difference}. {_REPEATED}")
        repetitions = [int(largest - count) for count, largest in zip(batches, largest_counts, strict=True)]
        self._may_repeat = any(repetitions)

        def repeat_last_batch(batch_idx: int, dataloader_idx: int) -> None:
            is_last_batch = batch_idx + 1 == batches[dataloader_idx]
            if is_last_batch:
                for _ in range(repetitions[dataloader_idx]):
                    self._strategy.predict_step(*self._last_arguments)
                self._last_arguments = ()

        if self._may_repeat:
            around_predictions(trainer, after=repeat_last_batch)

    def record_arguments(self, *args: Any) -> None:
        """Record what ``predict_step`` is called with, where the call may have to be repeated."""
        if self._may_repeat:
            self._last_arguments = args

    def _catch_up(self, loader_count: int, loader_idx: int | None) -> None:
        """Run the last batch again as long as another rank's next batch is of an earlier loader than this rank's.

        Args:
            loader_count: How many loaders there are.
            loader_idx: The loader of this rank's next batch; ``None`` if there is no next batch.

        Raises:
            ShardingError: This rank has had no batch of a loader of which another rank has one.
        """
        name = self._strategy.strategy_name
        runtime = self._strategy.runtime
        while True:
            # by loader, how many ranks have their next batch from it; all ranks run the earliest loader's first
            rank_counts = runtime.total([int(loader_idx == loader) for loader in range(loader_count)])
            current = next((loader for loader, rank_count in enumerate(rank_counts) if rank_count), None)
            if current is not None and rank_counts[current] < runtime.world_size and not self._has_reported:
                self._has_reported = True
                rank_zero_info(f"{name}: some ranks predict fewer batches of loader {current} than others. {_REPEATED}")
            if current is None or current == loader_idx:
                break
            if self._last_loader_idx != current:
                raise ShardingError(
                    f"{name}: rank {runtime.rank} has no batch of loader {current}, and another rank has one. All "
                    "ranks must take as many steps: each needs the shards of all, and this rank has none to run "
                    "again.\nGive each rank one batch of each loader at least: use fewer ranks, or smaller batches."
                )
            self._strategy.predict_step(*self._last_arguments)
        self._last_loader_idx = current
        if current is None:
            self._last_arguments = ()


_REPEATED = (
    "Those with fewer call predict_step again with their last batch, without other hooks, and drop what it returns: "
    "each step needs the shards of all ranks."
)


def _gather_if_different(runtime: Runtime, batches: Sequence[float]) -> list[list[float]] | None:
    """The numbers of batches of all ranks; ``None`` if they are the same."""
    digest = zlib.crc32(repr(list(map(float, batches))).encode()) >> 8  # so that sums of its squares fit into 64 bits
    total, sum_of_squares = runtime.total([digest, digest**2])
    return None if are_equal(total, sum_of_squares, runtime.world_size) else runtime.gather_objects(list(batches))


def _describe_counts(counts_by_rank: Sequence[Sequence[float]], verb: str) -> str:
    """Numbers of batches by rank, in words.

    Example:
        >>> _describe_counts([[4], [3], [4]], "predicts")
        'rank 0, 2 predicts 4 batches, and rank 1 predicts 3'
        >>> _describe_counts([[4, math.inf], [3, 2]], "tests")
        'rank 0 tests 4 + unknown batches, and rank 1 tests 3 + 2'
    """
    ranks_by_number: dict[str, list[int]] = {}
    for rank, counts in enumerate(counts_by_rank):
        number = " + ".join("unknown" if count == math.inf else str(int(count)) for count in counts) or "no"
        ranks_by_number.setdefault(number, []).append(rank)
    clauses = [f"{_name_ranks(ranks_with)} {verb} {number}" for number, ranks_with in ranks_by_number.items()]
    return ", and ".join([f"{clauses[0]} batches", *clauses[1:]])


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
