"""The description of ``"fsdp_auto"``, the only strategy name that is core's own: it chooses one of the others."""

from __future__ import annotations

from fsdp_core.plugins.strategy_info import Option, StrategyInfo

__all__ = ["AUTO"]

AUTO = StrategyInfo(
    name="fsdp_auto",
    summary="Rehearses the fit, and trains by the strategy that fits and costs least.",
    trainer="fsdp_core.rehearsal.auto_strategy:AutoStrategy",
    accelerators=("any", "cpu"),
    options=(Option(name="memory", help="Bytes that each device has; they are asked by default."),),
    requires=("torch>=2.9", "lightning>=2.6.6"),
)
