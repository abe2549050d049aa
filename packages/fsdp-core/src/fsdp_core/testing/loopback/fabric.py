"""``strategy="loopback"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_core.testing.loopback.constructor import LoopbackRanks

__all__ = ["LoopbackFabricStrategy"]


class LoopbackFabricStrategy(LoopbackRanks, ShardedFabricStrategy):
    """Shards parameters by hand, on the CPU."""
