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
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["EvenBatches"]


class EvenBatches:
    """Compares the ranks' numbers of batches, and repeats those that a rank lacks of a prediction.

    A rank takes such a step for the sake of the others, with its last batch. How many it has to take is known before
    the first step if all loaders have a length. Otherwise ranks compare before each batch whose next one is of which
    loader.

    Args:
        strategy: The strategy, whose ``predict_step`` runs a batch again.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy: Any = strategy
        self._keeps = self._has_told = False
        self._of: int | None = None
        self._last: tuple[Any, ...] = ()

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
        everyones = _of_ranks(self._strategy.runtime, batches)
        if everyones is None:
            return
        verb = "validates" if stage == "val" else "tests"
        raise ShardingError(
            f"{self._strategy.strategy_name}: {_describe_counts(everyones, verb)}. All ranks must take as many steps: "
            "each needs the shards of all, and what is logged is averaged over them.\n"
            "Give each rank as many batches: datasets of the same length, whose sampler is left to Lightning, or "
            f"Trainer(limit_{stage}_batches=N) with what the shortest has."
        )

    def follow_prediction(self) -> None:
        """Compare the numbers of batches, and let this rank run those that it lacks. All ranks must call it.

        Raises:
            ShardingError: A rank lacks batches of a loader and can't run its last one again.
        """
        name = self._strategy.strategy_name
        runtime = self._strategy.runtime
        trainer = self._strategy.lightning_module.trainer
        batches = lengths_of_predictions(trainer)
        everyones = _of_ranks(runtime, batches)
        around_predictions(trainer)
        self._keeps = self._has_told = False
        self._of = None
        self._last = ()
        difference = "" if everyones is None else _describe_counts(everyones, "predicts")
        if everyones is not None and len(set(map(len, everyones))) > 1:
            raise ShardingError(
                f"{name}: {difference}. All ranks must take as many steps: each needs the shards of all.\n"
                "Give each rank the same loaders."
            )
        module: Any = trainer.lightning_module
        takes_itself = "dataloader_iter" in inspect.signature(module.predict_step).parameters
        if math.inf in (count for counts in everyones or [batches] for count in counts):
            if runtime.world_size > 1 and not takes_itself:
                self._keeps = True
                loaders = len(batches)
                around_predictions(
                    trainer, before=lambda of: self._catch_up(loaders, of), end=lambda: self._catch_up(loaders, None)
                )
            return
        if everyones is None:
            return
        most = [max(counts) for counts in zip(*everyones, strict=True)]
        empty = [rank for rank, counts in enumerate(everyones) if 0 in counts and counts != most]
        if empty:
            raise ShardingError(
                f"{name}: {difference}. All ranks must take as many steps: each needs the shards of all, and rank "
                f"{', '.join(map(str, empty))} has no batch that it could run again.\n"
                "Give each rank one batch at least: use fewer ranks, or smaller batches."
            )
        if takes_itself:
            raise ShardingError(
                f"{name}: {difference}. All ranks must take as many steps: each needs the shards of all. "
                "predict_step(dataloader_iter) takes batches from the loader itself, so that none can be run again.\n"
                "Write predict_step(batch, batch_idx), or give each rank as many batches."
            )
        rank_zero_info(f"{name}: {difference}. {_REPEATED}")
        lacking = [int(m - n) for n, m in zip(batches, most, strict=True)]
        self._keeps = any(lacking)

        def after(batch_idx: int, dataloader_idx: int) -> None:
            if batch_idx + 1 == batches[dataloader_idx]:
                for _ in range(lacking[dataloader_idx]):
                    self._strategy.predict_step(*self._last)
                self._last = ()

        if any(lacking):
            around_predictions(trainer, after=after)

    def note(self, *args: Any) -> None:
        """Note what ``predict_step`` is called with, where a call may have to be repeated."""
        if self._keeps:
            self._last = args

    def _catch_up(self, loaders: int, of: int | None) -> None:
        """Run the last batch again until no rank has a further one of an earlier loader than this rank's next one.

        Args:
            loaders: How many loaders there are.
            of: The loader of this rank's next batch; ``None`` if it has none.

        Raises:
            ShardingError: This rank has had no batch of a loader of which another rank has one.
        """
        name = self._strategy.strategy_name
        runtime = self._strategy.runtime
        while True:
            counts = runtime.total([int(of == loader) for loader in range(loaders)])
            current = next((loader for loader, count in enumerate(counts) if count), None)
            if current is not None and counts[current] < runtime.world_size and not self._has_told:
                self._has_told = True
                rank_zero_info(f"{name}: some ranks predict fewer batches of loader {current} than others. {_REPEATED}")
            if current is None or current == of:
                break
            if self._of != current:
                raise ShardingError(
                    f"{name}: rank {runtime.rank} has no batch of loader {current}, and another rank has one. All "
                    "ranks must take as many steps: each needs the shards of all, and this rank has none to run "
                    "again.\nGive each rank one batch of each loader at least: use fewer ranks, or smaller batches."
                )
            self._strategy.predict_step(*self._last)
        self._of = current
        if current is None:
            self._last = ()


_REPEATED = (
    "Those with fewer call predict_step again with their last batch, without other hooks, and drop what it returns: "
    "each step needs the shards of all ranks."
)


def _of_ranks(runtime: Runtime, batches: Sequence[float]) -> list[list[float]] | None:
    """The numbers of batches of all ranks; ``None`` if they are the same."""
    digest = zlib.crc32(repr(list(map(float, batches))).encode()) >> 8
    total, of_squares = runtime.total([digest, digest**2])
    return None if are_equal(total, of_squares, runtime.world_size) else runtime.gather_objects(list(batches))


def _describe_counts(everyones: Sequence[Sequence[float]], verb: str) -> str:
    """Numbers of batches by rank, in words.

    Example:
        >>> _describe_counts([[4], [3], [4]], "predicts")
        'rank 0, 2 predicts 4 batches, and rank 1 predicts 3'
        >>> _describe_counts([[4, math.inf], [3, 2]], "tests")
        'rank 0 tests 4 + unknown batches, and rank 1 tests 3 + 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, counts in enumerate(everyones):
        number = " + ".join("unknown" if count == math.inf else str(int(count)) for count in counts) or "no"
        ranks.setdefault(number, []).append(rank)
    (first, its), *further = ranks.items()
    return ", and ".join(
        [f"{_name_ranks(its)} {verb} {first} batches", *(f"{_name_ranks(which)} {verb} {n}" for n, which in further)]
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
