"""The options of ``strategy="zero1"``, the same under Trainer and Fabric."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.sharding import ActivationCheckpointingPolicy, ShardingOptions, describe_policy, option

__all__ = ["ZeRO1Options"]


@dataclass(frozen=True, kw_only=True)
class ZeRO1Options(ShardingOptions):
    """Its own options; core adds those of all strategies."""

    activation_checkpointing_policy: ActivationCheckpointingPolicy | None = option(
        None, part_of="units", describe=describe_policy
    )
    """Which submodules recompute their activations in the backward pass: a set of classes or a function ``module ->
    bool``."""
    sync_each_batch: bool = False
    """Whether gradients are reduced on every micro-batch of an accumulation."""
