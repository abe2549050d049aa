"""The options of ``strategy="zero1"``, the same under Trainer and Fabric."""

from __future__ import annotations

from typing import Any

from fsdp_core.lightning import StrategyOptions
from fsdp_core.sharding import ActivationCheckpointingPolicy
from fsdp_example.backend import ZeRO1Backend

__all__ = ["ZeRO1Options"]


class ZeRO1Options(StrategyOptions):
    """The constructor of both classes.

    Args:
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
    """

    def __init__(
        self,
        *common: Any,
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        **others: Any,
    ) -> None:
        backend = ZeRO1Backend(
            activation_checkpointing_policy=activation_checkpointing_policy, sync_each_batch=sync_each_batch
        )
        super().__init__(backend, *common, strategy_name="zero1", **others)
