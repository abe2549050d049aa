"""``strategy="zero1"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_example.constructor import ZeRO1Options

__all__ = ["ZeRO1Strategy"]


class ZeRO1Strategy(ZeRO1Options, ShardedFabricStrategy):
    """Shards the optimizers of modules, and keeps parameters whole."""
