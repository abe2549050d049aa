"""The global batch, kept by accumulation where the number of ranks changes."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from fsdp_core.errors import ShardingError

__all__ = ["GlobalBatch", "batch_size_of", "data_parallel_ranks", "keeps_global_batch", "micro_batches"]


def micro_batches(size: int, *, per_rank: int, ranks: int) -> int:
    """How many micro-batches each rank accumulates for one optimizer step.

    Args:
        size: The global batch: samples of one optimizer step, of all ranks together.
        per_rank: The samples of one micro-batch of one rank.
        ranks: The number of data-parallel ranks.

    Returns:
        ``size / (per_rank * ranks)``.

    Raises:
        ShardingError: That is not a whole number; the message names sizes that are.

    Example:
        >>> micro_batches(64, per_rank=4, ranks=8), micro_batches(64, per_rank=4, ranks=2)
        (2, 8)
        >>> micro_batches(64, per_rank=4, ranks=3)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: a global batch of 64 samples can't be divided into ... of 4 on 3 ranks.
        Write 60 or 72, another number of samples per rank, or start another number of ranks.
    """
    for name, value in (("size", size), ("per_rank", per_rank), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShardingError(f"{name}={value!r} is not a number of samples or ranks.\nWrite a whole number from 1.")
    samples_per_batch = per_rank * ranks
    if size % samples_per_batch:
        smaller_size = size // samples_per_batch * samples_per_batch
        larger_size = smaller_size + samples_per_batch
        sizes = f"{smaller_size} or {larger_size}" if smaller_size else str(larger_size)
        raise ShardingError(
            f"a global batch of {size} samples can't be divided into micro-batches of {per_rank} on {ranks} ranks.\n"
            f"Write {sizes}, another number of samples per rank, or start another number of ranks."
        )
    return size // samples_per_batch


class GlobalBatch(pl.Callback):
    """Says what becomes of the global batch where a run goes on with another number of ranks.

    With a size, it is kept: ``accumulate_grad_batches`` of the Trainer follows from the number of data-parallel ranks,
    which an elastic launcher may change from one attempt to the next. With ``"scaled"``, it grows and shrinks with the
    ranks; learning rates are the user's. Without this callback it is scaled too, and a fit that resumes with another
    global batch on another number of ranks warns.

    Args:
        size: The samples of an optimizer step, of all ranks together; or ``"scaled"``.
        per_rank: The samples of one micro-batch of one rank: the ``batch_size`` of the training loader.

    Raises:
        ShardingError: ``size`` is neither a number nor ``"scaled"``, or ``per_rank`` is missing.

    Example:
        >>> GlobalBatch(64, per_rank=4).size, GlobalBatch("scaled").size
        (64, 'scaled')
    """

    def __init__(self, size: int | Literal["scaled"], *, per_rank: int | None = None) -> None:
        if size != "scaled":
            micro_batches(size, per_rank=1, ranks=1)
            if per_rank is None:
                raise ShardingError(
                    f"GlobalBatch({size}) does not say how many samples a rank takes at a time.\n"
                    f"Write GlobalBatch({size}, per_rank=...), with the batch_size of the training loader."
                )
            micro_batches(per_rank, per_rank=per_rank, ranks=1)
        self.size = size
        self.per_rank = per_rank

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the Trainer's ``accumulate_grad_batches``, before schedulers ask how many steps there are.

        Raises:
            ShardingError: The size can't be divided over these ranks, or something else accumulates too.
        """
        if stage != "fit" or self.size == "scaled":
            return
        assert self.per_rank is not None
        ranks = data_parallel_ranks(trainer)
        needed = micro_batches(self.size, per_rank=self.per_rank, ranks=ranks)
        request = f"GlobalBatch({self.size}, per_rank={self.per_rank})"
        if not pl_module.automatic_optimization:
            raise ShardingError(
                f"{request} can't accumulate in manual optimization, where {type(pl_module).__name__} steps itself.\n"
                "Leave it out, and accumulate fsdp_core.lightning.micro_batches(...) batches in training_step()."
            )
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        accumulated = trainer.accumulate_grad_batches
        conflict = None if accumulated in (1, needed) else f"accumulate_grad_batches={accumulated}"
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            conflict = "GradientAccumulationScheduler"
        if conflict is not None:
            raise ShardingError(
                f"{request} needs accumulate_grad_batches={needed} on {ranks} ranks, and the Trainer also has "
                f"{conflict}.\nLeave one of the two out."
            )
        trainer.accumulate_grad_batches = needed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare ``per_rank`` with the training loader's batches.

        Raises:
            ShardingError: They differ.
        """
        size = batch_size_of(trainer)
        if self.per_rank is not None and size is not None and size != self.per_rank:
            raise ShardingError(
                f"GlobalBatch(..., per_rank={self.per_rank}) does not fit the training loader, whose batches have "
                f"{size} samples.\nWrite per_rank={size}, or batch_size={self.per_rank}."
            )


def keeps_global_batch(trainer: pl.Trainer) -> bool:
    """Whether the user has given a size that is kept on any number of ranks."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, GlobalBatch) and callback.size != "scaled" for callback in callbacks)


def data_parallel_ranks(trainer: pl.Trainer) -> int:
    """How many ranks get different batches."""
    kwargs: Any = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else trainer.world_size


def batch_size_of(trainer: pl.Trainer) -> int | None:
    """The samples in a batch of the training loader; ``None`` if there are several loaders, or it can't be known."""
    loader: Any = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
