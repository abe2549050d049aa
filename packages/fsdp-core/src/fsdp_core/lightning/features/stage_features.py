"""What a Trainer's stages have beside steps: a feature each, in the order in which they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.lightning.features.background_saves import BackgroundSaves
from fsdp_core.lightning.features.base_of_frozen import BaseOfFrozen
from fsdp_core.lightning.features.callbacks_over_shards import CallbacksOverShards
from fsdp_core.lightning.features.even_batches import EvenBatches
from fsdp_core.lightning.features.exact_resume import ExactResume
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.features.fit_checks import FitChecks
from fsdp_core.lightning.features.late_param_groups import LateParamGroups
from fsdp_core.lightning.features.metrics import MetricsOverData
from fsdp_core.lightning.features.preemption import Preemption
from fsdp_core.lightning.features.unequal_tokens import UnequalTokens

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["StageFeatures"]


class StageFeatures:
    """The features of a Trainer's stages. The strategy passes on the moments that several of them share.

    The order matters in three places:

    - Preemption is first, so that a signal that comes while a stage is set up is noted, and warned of first at its end.
    - Checks come before anything is done to the module.
    - Metrics and callbacks come before exact resume: they may draw random numbers. As training starts, exact resume
      restores the generators' state, and after that nothing may draw before the first batch.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self.preemption = Preemption(strategy)
        self.saves = BackgroundSaves(strategy)
        self.exact_resume = ExactResume(strategy)
        self.late_param_groups = LateParamGroups()
        self.even_batches = EvenBatches(strategy)
        self.unequal_tokens = UnequalTokens(strategy)
        self.in_order: tuple[Feature, ...] = (
            self.preemption,
            self.saves,
            FitChecks(strategy),
            MetricsOverData(strategy.runtime),
            CallbacksOverShards(strategy),
            BaseOfFrozen(strategy),
            self.exact_resume,
            self.late_param_groups,
        )
