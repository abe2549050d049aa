"""What fsdp-fsdp2 provides, as plain data; imports neither torch nor Lightning."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsdp_core import Capability, StrategyInfo, hookimpl
from fsdp_core.plugins import options_in

__all__ = ["fsdp_strategies", "why_not_here"]

_FSDP2 = StrategyInfo(
    name="fsdp2",
    summary="Fully sharded data parallel with torch's fully_shard (FSDP2).",
    trainer="fsdp_fsdp2.trainer:FSDP2Strategy",
    fabric="fsdp_fsdp2.fabric:FSDP2Strategy",
    accelerators=("any", "cpu"),
    capabilities=frozenset(Capability),
    options=options_in("fsdp_fsdp2.options:FSDP2Options"),
    requires=("torch>=2.9", "lightning>=2.6.6"),
    probe="fsdp_fsdp2.plugin:why_not_here",
)


@hookimpl
def fsdp_strategies() -> list[StrategyInfo]:
    """The two names of this package."""
    return [
        _FSDP2,
        replace(
            _FSDP2,
            name="fsdp2_cpu_offload",
            summary="fsdp2 with shards, gradients and optimizer state in host memory.",
            presets={"cpu_offload": True},
        ),
    ]


def why_not_here() -> str | None:
    """The reason why fsdp2 can't run on this machine, or ``None``. It needs gloo for process groups on the CPU."""
    platform: str = sys.platform  # mypy would take the platform that it runs on for the only one
    if platform in ("linux", "darwin", "win32"):
        return None
    return f"torch has no gloo on the platform {platform!r}, and fsdp2 needs it; use Linux, macOS or Windows"
