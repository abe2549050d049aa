"""A warning about batches that keep changing shape, because XLA compiles separate programs for each shape."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["BatchShapes", "stage_of"]


def stage_of(module: pl.LightningModule | None) -> str:
    """The stage of a module's Trainer, such as "train", "validate", "test", "predict" or "sanity_check"."""
    stage = None if module is None else module.trainer.state.stage
    return "none" if stage is None else str(stage.value)


#: The most shapes per stage without a warning. Two are normal: that of all batches but the last, and that of the last.
_MAX_SHAPES = 3


class BatchShapes:
    """The shapes of the batches of a run, by stage.

    Example:
        >>> import torch
        >>> shapes = BatchShapes()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for rows in (8, 8, 3, 5, 6, 7):
        ...         shapes.note("train", torch.zeros(rows, 2))
        >>> len(caught), "(8, 2), (3, 2), (5, 2), (6, 2)" in str(caught[0].message)
        (1, True)
    """

    def __init__(self) -> None:
        self._shapes: dict[str, list[tuple[tuple[int, ...], ...]]] = {}

    def note(self, stage: str, batch: Any) -> None:
        """Record a batch's shapes, and warn once for each stage that has had too many.

        Args:
            stage: The stage in which the batch is used.
            batch: A nested collection of tensors.
        """
        shapes: list[tuple[int, ...]] = []
        apply_to_collection(batch, Tensor, lambda tensor: shapes.append(tuple(tensor.shape)))
        earlier_shapes = self._shapes.setdefault(stage, [])
        if tuple(shapes) in earlier_shapes or len(earlier_shapes) > _MAX_SHAPES:
            return
        earlier_shapes.append(tuple(shapes))
        if len(earlier_shapes) > _MAX_SHAPES:
            texts = [" and ".join(map(str, batch_shapes)) or "no tensor" for batch_shapes in earlier_shapes]
            warnings.warn(
                f"the batches of {stage!r} have had {len(texts)} different shapes so far, and XLA compiles programs "
                f"for each: {', '.join(texts)}.\nPad them to one shape, or to a few, and write drop_last=True in "
                "the DataLoader.",
                stacklevel=2,
            )
