"""What fsdp-example provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["fsdp_strategies"]


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The one name of this package."""
    return [
        StrategyInfo(
            name="zero1",
            summary="Whole parameters on every rank, optimizer state sharded (ZeRO-1), on the CPU.",
            trainer="fsdp_example.trainer:ZeRO1Strategy",
            fabric="fsdp_example.fabric:ZeRO1Strategy",
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
            options=options_in("fsdp_example.options:ZeRO1Options"),
            requires=("torch>=2.9", "lightning>=2.6.6"),
        )
    ]
