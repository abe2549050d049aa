"""What both strategies of ``"loopback"`` share: the name and the backend. It has no options of its own."""

from __future__ import annotations

from fsdp_core.lightning import ShardedStrategy
from fsdp_core.testing.loopback.backend import LoopbackBackend

__all__ = ["LoopbackRanks"]


class LoopbackRanks(ShardedStrategy):
    """The half of ``"loopback"`` that is the same under Trainer and Fabric; tests give other names and backends."""

    strategy_name = "loopback"
    backend_class = LoopbackBackend
