"""Where an XLA strategy runs: XLA devices instead of what Lightning chose.

A Trainer's XLA accelerator must see an XLA strategy of Lightning's, but only in its last check: seen as one before,
Lightning's XLA precision would get in first. So a strategy's class is registered as one when it is given that
accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import XLAFSDPStrategy as FabricXLAFSDPStrategy
from lightning.pytorch.strategies import XLAStrategy

from fsdp_xla.lightning.accelerator import accelerator_for

__all__ = ["OnXLADevices"]


_seen: dict[type[Any], type[Any]] = {}


def _seen_as_lightnings(strategy: Any) -> Any:
    """The same class, which Lightning takes for an XLA strategy of its own; its XLA accelerator runs no other.

    It asks when all is chosen. Before, it would ask its own XLA precision what ``precision=`` means, which knows no
    mixed one, so that no class of ours may be taken for one from the start.
    """
    if strategy in _seen:
        return _seen[strategy]
    seen = type(strategy.__name__, (strategy,), {"__module__": strategy.__module__, "__doc__": strategy.__doc__})
    for lightnings in (XLAStrategy, FabricXLAFSDPStrategy):
        lightnings.register(seen)
    _seen[strategy] = seen
    return seen


class OnXLADevices:
    """The part of a strategy that turns Lightning's accelerator and devices into XLA's. Comes before core's adapter."""

    strategy_name: str
    _accelerator: Any
    _parallel_devices: list[torch.device] | None

    @property
    def accelerator(self) -> Any:
        """What runs the devices."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator_for(self.strategy_name, accelerator)
        if isinstance(self._accelerator, XLAAccelerator):
            self.__class__ = _seen_as_lightnings(type(self))

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The XLA devices of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        is_cpu = bool(devices) and all(device.type == "cpu" for device in devices or ())
        self._parallel_devices = [torch.device("xla", i) for i in range(len(devices or ()))] if is_cpu else devices
