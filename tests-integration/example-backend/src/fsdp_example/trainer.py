"""``strategy="zero1"`` for the Trainer."""

from __future__ import annotations

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_example.constructor import ZeRO1Ranks

__all__ = ["ZeRO1Strategy"]


class ZeRO1Strategy(ZeRO1Ranks, ShardedTrainerStrategy):
    """Shards the LightningModule's optimizers, and keeps parameters whole."""
