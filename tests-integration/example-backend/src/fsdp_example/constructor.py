"""What both strategies of ``"zero1"`` share: the name, the options and the backend."""

from __future__ import annotations

from fsdp_core.lightning import ShardedStrategy
from fsdp_example.backend import ZeRO1Backend
from fsdp_example.options import ZeRO1Options

__all__ = ["ZeRO1Ranks"]


class ZeRO1Ranks(ShardedStrategy):
    """The half of the strategy that is the same under Trainer and Fabric."""

    strategy_name = "zero1"
    options_class = ZeRO1Options
    backend_class = ZeRO1Backend
