"""Where an XLA strategy runs: XLA devices in the place of what Lightning chose."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_xla.accelerator import accelerator_for

__all__ = ["OnXLADevices"]


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

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The XLA devices of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        is_cpu = bool(devices) and all(device.type == "cpu" for device in devices or ())
        self._parallel_devices = [torch.device("xla", i) for i in range(len(devices or ()))] if is_cpu else devices
