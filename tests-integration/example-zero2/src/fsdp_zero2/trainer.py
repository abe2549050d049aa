"""``strategy="zero2"`` for the Trainer."""

from __future__ import annotations

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_zero2.constructor import ZeRO2Ranks

__all__ = ["ZeRO2Strategy"]


class ZeRO2Strategy(ZeRO2Ranks, ShardedTrainerStrategy):
    """Shards the LightningModule's optimizers, and keeps parameters whole."""
