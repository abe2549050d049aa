"""The description of the strategy ``loopback``, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["LOOPBACK", "fsdp_strategies"]

LOOPBACK = StrategyInfo(
    name="loopback",
    summary="Parameters sharded by hand over gloo, for tests and as an example.",
    trainer="fsdp_core.testing.loopback.trainer:LoopbackTrainerStrategy",
    fabric="fsdp_core.testing.loopback.fabric:LoopbackFabricStrategy",
    accelerators=("cpu",),
    capabilities=frozenset(
        {
            Capability.CLIP_BY_NORM,
            Capability.CLIP_BY_VALUE,
            Capability.FULL_CHECKPOINT,
            Capability.GRADIENT_ACCUMULATION,
            Capability.MANUAL_OPTIMIZATION,
            Capability.META_INIT,
            Capability.SHARDED_CHECKPOINT,
        }
    ),
    options=options_in(),
    requires=("torch>=2.9", "lightning>=2.6.6"),
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The one name."""
    return [LOOPBACK]
