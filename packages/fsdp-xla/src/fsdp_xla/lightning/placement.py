"""Placement of XLA strategies: XLA devices instead of Lightning's choice.

A Trainer with Lightning's XLA accelerator accepts only Lightning's XLA strategies, which it checks last. If it took
this strategy for one of them before, it would choose its own XLA precision. So the strategy's class is registered as
one of them only when the strategy gets that accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import XLAFSDPStrategy as FabricXLAFSDPStrategy
from lightning.pytorch.strategies import XLAStrategy

from fsdp_xla.lightning.accelerator import accelerator_for

__all__ = ["OnXLADevices"]


_registered: dict[type[Any], type[Any]] = {}


def _as_lightnings_strategy(strategy: Any) -> Any:
    """Return a subclass that Lightning takes for one of its own XLA strategies.

    To be called when the accelerator is set: before, Lightning would choose its own XLA precision, which has no mixed
    precision.
    """
    if strategy in _registered:
        return _registered[strategy]
    registered_class = type(
        strategy.__name__, (strategy,), {"__module__": strategy.__module__, "__doc__": strategy.__doc__}
    )
    for lightning_class in (XLAStrategy, FabricXLAFSDPStrategy):
        lightning_class.register(registered_class)
    _registered[strategy] = registered_class
    return registered_class


class OnXLADevices:
    """Mixin that replaces Lightning's accelerator and devices by XLA's. Must precede core's adapter in the bases."""

    strategy_name: str
    _accelerator: Any
    _parallel_devices: list[torch.device] | None

    @property
    def accelerator(self) -> Any:
        """The accelerator of the devices."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator_for(self.strategy_name, accelerator)
        if isinstance(self._accelerator, XLAAccelerator):
            self.__class__ = _as_lightnings_strategy(type(self))

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The XLA devices of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        is_cpu = bool(devices) and all(device.type == "cpu" for device in devices or ())
        self._parallel_devices = [torch.device("xla", i) for i in range(len(devices or ()))] if is_cpu else devices
