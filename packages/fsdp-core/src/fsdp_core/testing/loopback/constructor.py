"""The constructor of ``strategy="loopback"``, the same under Trainer and Fabric."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdp_core.lightning import StrategyOptions
from fsdp_core.testing.loopback.backend import LoopbackBackend

__all__ = ["LoopbackOptions"]


class LoopbackOptions(StrategyOptions):
    """Has no options of its own: core's adapters add those that all strategies share."""

    #: The name that users type, and the backend behind it; tests give others.
    called: ClassVar[str] = "loopback"
    backend_class: ClassVar[type[LoopbackBackend]] = LoopbackBackend

    def __init__(self, *common: Any, **others: Any) -> None:
        super().__init__(self.backend_class(), *common, strategy_name=self.called, **others)
