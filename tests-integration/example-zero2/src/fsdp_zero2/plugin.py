"""What fsdp-zero2 provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["fsdp_strategies"]


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The one name of this package."""
    return [
        StrategyInfo(
            name="zero2",
            summary="Whole parameters on every rank, gradients and optimizer state sharded (ZeRO-2), on the CPU.",
            trainer="fsdp_zero2.trainer:ZeRO2Strategy",
            fabric="fsdp_zero2.fabric:ZeRO2Strategy",
            accelerators=("cpu",),
            capabilities=frozenset(
                {
                    Capability.ACTIVATION_CHECKPOINTING,
                    Capability.CLIP_BY_NORM,
                    Capability.CLIP_BY_VALUE,
                    Capability.FULL_CHECKPOINT,
                    Capability.GRADIENT_ACCUMULATION,
                    Capability.MANUAL_OPTIMIZATION,
                    Capability.META_INIT,
                    Capability.SHARDED_CHECKPOINT,
                }
            ),
            options=options_in("fsdp_zero2.options:ZeRO2Options"),
            requires=("torch>=2.9", "lightning>=2.6.6"),
        )
    ]
