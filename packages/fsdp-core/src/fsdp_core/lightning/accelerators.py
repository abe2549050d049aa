"""Lightning's accelerator for whatever device :mod:`torch.accelerator` finds, where Lightning has none of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator as FabricAccelerator
from lightning.pytorch.accelerators import Accelerator

from fsdp_core import devices
from fsdp_core.device_names import LIGHTNINGS_OWN, VISIBILITY
from fsdp_core.errors import StrategyUnavailableError
from fsdp_core.lightning.launchers.launch_checks import ranks_on_host

__all__ = ["TorchAccelerator", "announce_accelerator"]


class TorchAccelerator(Accelerator, FabricAccelerator):
    """The devices of torch's accelerator, such as XPUs, or NPUs where ``torch_npu`` is installed.

    Trainer and Fabric find it by the kind of the devices: ``accelerator="npu"``. With ``accelerator="auto"``, a
    strategy that runs on any accelerator takes it.

    Example:
        >>> TorchAccelerator.is_available()  # on a machine with a CPU alone
        False
    """

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one.

        Raises:
            StrategyUnavailableError: It is of another kind.
        """
        if device.type != self.name():
            raise StrategyUnavailableError(
                f"{device} is no device of the accelerator {self.name()!r}, which this run is on. Lightning's own "
                "strategies put a model on the CPU where the accelerator is none of Lightning's own.\n"
                "Write a strategy that `fsdp list` shows on 'any' accelerator; it takes devices=1 too. Or, from "
                f"lightning.pytorch.strategies, strategy=SingleDeviceStrategy(device='{self.name()}:0')."
            )
        devices.select(device)

    def teardown(self) -> None:
        """Give memory back that torch keeps for later."""
        if devices.is_initialized(self.name()):
            torch.accelerator.memory.empty_cache()

    def get_device_stats(self, device: str | torch.device | int) -> dict[str, Any]:
        """Figures of a device's memory, for ``DeviceStatsMonitor``: what torch's allocator for it counts, in bytes."""
        return dict(torch.accelerator.memory.memory_stats(torch.device(device)))

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """The indices of the devices that ``devices=`` names: a number, ``-1`` for all, or indices.

        Raises:
            StrategyUnavailableError: This machine has fewer, or it is none of these.
        """
        is_list = isinstance(devices, str) and "," in devices
        count = torch.accelerator.device_count()
        number = 0
        try:
            if is_list:
                indices = [int(index) for index in str(devices).split(",") if index.strip()]
            elif isinstance(devices, int | str):
                number = count if int(devices) == -1 else int(devices)
                indices = list(range(number))
            else:
                indices = [int(index) for index in devices]
        except (TypeError, ValueError):
            number = -1
        if number < 0:
            raise StrategyUnavailableError(
                f"devices={devices!r} is neither a number of devices nor their indices.\n"
                f"Write a number of at most {count}, indices below it such as [0], or -1 or 'auto' for all."
            )
        if len(set(indices)) != len(indices) or any(not 0 <= index < count for index in indices):
            kind = TorchAccelerator.name()
            raise StrategyUnavailableError(
                f"devices={devices!r} asks for a rank on each of {kind} {indices}, and torch sees {count} here.\n"
                f"{_advise_on_devices(count)}{_hint_of_hidden(kind)}"
            )
        return indices

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        """The devices with these indices."""
        return [torch.device(TorchAccelerator.name(), index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many devices torch sees on this machine."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether torch sees a device."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """The kind of the devices."""
        return devices.accelerator_kind() or "none"


def _advise_on_devices(count: int) -> str:
    """What to write where torch sees too few devices."""
    launched = ranks_on_host()
    if launched is None or launched[1] <= count:
        return f"Write devices={count} or fewer, or indices below {count}, each once."
    launcher, ranks = launched
    slurms = f": under SLURM by --gpus-per-node={ranks}, and without --gpus-per-task" if launcher == "SLURM" else ""
    return (
        f"{launcher} has started {ranks} ranks on this host, of which each takes the device of its local rank. Let all "
        f"of them see the same {ranks} devices{slurms}."
    )


def _hint_of_hidden(kind: str) -> str:
    """Names the variable that hides devices of a kind from this process, if it is set."""
    variable = VISIBILITY.get(kind)
    value = None if variable is None else os.environ.get(variable)
    return "" if value is None else f" {variable}={value} hides the others from this process."


def announce_accelerator(log: logging.Logger, device: torch.device, number: int) -> None:
    """Log whether a run is on torch's accelerator, where Lightning has none for it: its own lines tell GPUs and TPUs.

    Args:
        log: Lightning's logger for rank 0.
        device: The device of rank 0, which is the current one.
        number: How many devices of its host the run is on.
    """
    kind = devices.accelerator_kind()
    if kind is None or kind in LIGHTNINGS_OWN or not log.isEnabledFor(logging.INFO):
        return
    line = f"{kind} available: {torch.accelerator.is_available()}, used: {device.type == kind}"
    if device.type == kind:
        model = devices.device_model(kind, device.index or 0) or "unnamed"
        line += f" ({number} device{'s' if number > 1 else ''}: {model})"
    log.info(line)
