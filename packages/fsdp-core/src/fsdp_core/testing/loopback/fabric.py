"""``strategy="loopback"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_core.testing.loopback.constructor import LoopbackOptions

__all__ = ["LoopbackFabricStrategy"]


class LoopbackFabricStrategy(LoopbackOptions, ShardedFabricStrategy):
    """Shards parameters by hand, on the CPU."""
