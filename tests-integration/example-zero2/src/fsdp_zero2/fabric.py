"""``strategy="zero2"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_zero2.constructor import ZeRO2Ranks

__all__ = ["ZeRO2Strategy"]


class ZeRO2Strategy(ZeRO2Ranks, ShardedFabricStrategy):
    """Shards the optimizers of modules, and keeps parameters whole."""
