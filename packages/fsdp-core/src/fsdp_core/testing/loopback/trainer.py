"""``strategy="loopback"`` for Trainer."""

from __future__ import annotations

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.testing.loopback.constructor import LoopbackRanks

__all__ = ["LoopbackTrainerStrategy"]


class LoopbackTrainerStrategy(LoopbackRanks, ShardedTrainerStrategy):
    """Shards parameters by hand, on the CPU."""
