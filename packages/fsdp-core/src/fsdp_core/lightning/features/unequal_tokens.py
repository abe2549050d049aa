"""Warns once if ranks have different numbers of labels in a step, and average the means of their losses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_core.errors import warn
from fsdp_core.lightning.features.sharded_optimizers import is_compared_step
from fsdp_core.sharding.sequence import IGNORED, batch_entries

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["UnequalTokens"]

#: The standard deviation of the ranks' numbers, relative to their mean, from which it is warned: some two of them then
#: differ by more than 5 %.
_SPREAD = 0.025


class UnequalTokens:
    """Counts the labels of a Trainer's batches while they are in host memory, and compares the ranks' numbers.

    That is done for the steps before which replicas are compared too: the first, second, fourth and so on. Of a batch's
    integer entries, those are counted that are named labels or targets; without names, the last one.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        self._count = 0
        self._is_over = False

    def count(self, batch: Any) -> None:
        """Count the labels of a batch, before it is moved to the device."""
        module = self._strategy.lightning_module
        if self._is_over or module is None or not module.trainer.training:
            return
        if is_compared_step(module.trainer.global_step + 1):
            self._count += sum(int((labels != IGNORED).sum()) for labels in _labels_of(batch))

    def compare(self) -> None:
        """Compare the ranks' numbers before a step, and warn if they differ. All ranks must call it."""
        runtime, module = self._strategy.runtime, self._strategy.lightning_module
        if self._is_over or runtime.world_size == 1 or runtime.is_rehearsed or module is None:
            return
        if not is_compared_step(module.trainer.global_step + 1):
            return
        count, self._count = self._count, 0
        is_mean_over_tokens = self._strategy.token_means.take_use()
        total, squares, uses = runtime.data.total([count, count * count, is_mean_over_tokens])
        ranks = runtime.data_parallel_world_size
        if uses or not total:
            return
        spread = math.sqrt(max(ranks * squares - total * total, 0)) / total
        if spread <= _SPREAD:
            return
        self._is_over = True
        if runtime.rank == 0:
            warn(
                f"ranks have different numbers of labels in step {module.trainer.global_step + 1}: {total} in all, "
                f"with a standard deviation of {spread:.0%} of the mean. If the loss is a mean over a rank's labels, "
                "one of a rank with few counts more than one of a rank with many.\n"
                "Write loss = fsdp_core.token_mean(losses.sum(), count), the mean over those of all ranks; or "
                "warnings.filterwarnings('ignore', 'ranks have different numbers of labels')."
            )


def _labels_of(batch: Any) -> list[Tensor]:
    """The labels of a batch that are in host memory."""
    entries = [
        (name.rpartition(".")[2].lower(), tensor)
        for name, tensor in batch_entries(batch)
        if type(tensor) is Tensor and tensor.dtype in (torch.int64, torch.int32) and tensor.device.type == "cpu"
    ]
    named = [tensor for name, tensor in entries if "label" in name or "target" in name]
    return named or [tensor for name, tensor in entries[-1:] if name.isdigit()]
