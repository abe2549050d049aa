"""What a fit's frozen parameters are before its first step, with which ``save_frozen=False`` compares them later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

from fsdp_core.lightning.features.feature import Feature
from fsdp_core.sharding.sharded import Sharded

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["BaseOfFrozen"]


class BaseOfFrozen(Feature):
    """Notes the values that a fit begins with.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy

    def train_start(self, trainer: pl.Trainer, sharded: Sharded) -> None:
        self._strategy.frozen_parameters.note(sharded)
