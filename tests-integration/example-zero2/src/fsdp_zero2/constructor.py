"""The options of ``strategy="zero2"``, the same under Trainer and Fabric."""

from __future__ import annotations

from typing import Any

from fsdp_core.lightning import StrategyOptions
from fsdp_core.sharding import ActivationCheckpointingPolicy
from fsdp_zero2.backend import ZeRO2Backend

__all__ = ["ZeRO2Options"]


class ZeRO2Options(StrategyOptions):
    """The constructor of both classes.

    Args:
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
        bucket_bytes: How many bytes of gradients are reduced together, while the backward pass goes on.
    """

    def __init__(
        self,
        *common: Any,
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        bucket_bytes: int = 1024,
        **others: Any,
    ) -> None:
        backend = ZeRO2Backend(
            activation_checkpointing_policy=activation_checkpointing_policy,
            sync_each_batch=sync_each_batch,
            bucket_bytes=bucket_bytes,
        )
        super().__init__(backend, *common, strategy_name="zero2", **others)
