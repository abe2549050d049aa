"""``strategy="zero1"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_example.constructor import ZeRO1Ranks

__all__ = ["ZeRO1Strategy"]


class ZeRO1Strategy(ZeRO1Ranks, ShardedFabricStrategy):
    """Shards the optimizers of modules, and keeps parameters whole."""
