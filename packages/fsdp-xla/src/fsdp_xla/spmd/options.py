"""The options of ``strategy="xla_fsdp_spmd"``, the same under Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_core.sharding import ActivationCheckpointingPolicy, ShardingOptions, WrapPolicy, describe_policy, option

__all__ = ["LEFT_OUT", "XLASPMDOptions"]

#: Options of all strategies that one process for all devices has no use for.
LEFT_OUT = ("cluster_environment", "timeout", "hang_timeout", "scattered_save")


def plain_plan(plan: Mapping[str, int] | None) -> dict[str, int]:
    """The plan as plain data, for comparison between strategies."""
    return dict(plan or {})


@dataclass(frozen=True, kw_only=True)
class XLASPMDOptions(ShardingOptions):
    """The options of both strategy classes."""

    auto_wrap_policy: WrapPolicy | None = option("auto", part_of="units", describe=describe_policy)
    """Which submodules are gathered and freed together: a set of classes, a function ``module -> bool`` or one of
    torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s, or ``None`` for the root alone."""
    activation_checkpointing_policy: str | ActivationCheckpointingPolicy | None = option(
        None, part_of="units", describe=describe_policy
    )
    """Which submodules recompute their activations in the backward pass: a set of classes, a function ``module ->
    bool``, or ``"every_2"`` for every second repeated block, and so on."""
    tensor_parallel_size: int = 1
    """The number of devices that share one part of the batch and shard weights by ``tensor_plan``. It must divide
    the number of devices."""
    tensor_plan: Mapping[str, int] | None = option(None, part_of="units", describe=plain_plan)
    """By pattern of parameter names (``*`` matches anything), the dimension to shard over these devices, such as
    ``{"*.mlp.up.weight": 0, "*.mlp.down.weight": 1}``. Other parameters are replicated on them."""
