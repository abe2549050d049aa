"""``strategy="zero1"`` for the Trainer."""

from __future__ import annotations

from typing import Any

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.sharding import ActivationCheckpointingPolicy
from fsdp_example.backend import ZeRO1Backend

__all__ = ["ZeRO1Strategy"]


class ZeRO1Strategy(ShardedTrainerStrategy):
    """Shards the LightningModule's optimizers, and keeps parameters whole.

    Args:
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
        **options: Those of :class:`~fsdp_core.lightning.ShardedTrainerStrategy`.
    """

    def __init__(
        self,
        *,
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        **options: Any,
    ) -> None:
        backend = ZeRO1Backend(
            activation_checkpointing_policy=activation_checkpointing_policy, sync_each_batch=sync_each_batch
        )
        super().__init__(backend, strategy_name="zero1", **options)
