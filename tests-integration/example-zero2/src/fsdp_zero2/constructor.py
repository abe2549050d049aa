"""What both strategies of ``"zero2"`` share: the name, the options and the backend."""

from __future__ import annotations

from fsdp_core.lightning import ShardedStrategy
from fsdp_zero2.backend import ZeRO2Backend
from fsdp_zero2.options import ZeRO2Options

__all__ = ["ZeRO2Ranks"]


class ZeRO2Ranks(ShardedStrategy):
    """The half of the strategy that is the same under Trainer and Fabric."""

    strategy_name = "zero2"
    options_class = ZeRO2Options
    backend_class = ZeRO2Backend
