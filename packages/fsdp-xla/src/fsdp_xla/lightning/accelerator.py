"""XLA's CPU devices as a Lightning accelerator."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.accelerators import CPUAccelerator as FabricCPUAccelerator
from lightning.fabric.accelerators import XLAAccelerator
from lightning.pytorch.accelerators import Accelerator

from fsdp_core import StrategyUnavailableError
from fsdp_xla.cpu_ranks import uses_cpu_devices

__all__ = ["XLACPUAccelerator", "accelerator_for"]


class XLACPUAccelerator(Accelerator):
    """XLA's CPU devices, whose number is ``CPU_NUM_DEVICES``.

    It is available only if ``PJRT_DEVICE=CPU`` is set. It is not a subclass of Lightning's own XLA accelerator, which
    counts only TPU chips.

    Example:
        >>> import os
        >>> os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
        >>> XLACPUAccelerator.is_available(), XLACPUAccelerator.get_parallel_devices(2)
        (True, [device(type='xla', index=0), device(type='xla', index=1)])
    """

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do: the runtime starts with the first use of a device."""

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        """Nothing to do: the runtime ends with the process."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """The requested number of devices; -1, or the string "-1", means all."""
        count = len(devices) if isinstance(devices, list | tuple) else int(devices)
        return XLACPUAccelerator.auto_device_count() if count == -1 else count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("xla", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return int(os.environ.get("CPU_NUM_DEVICES", "1"))

    @staticmethod
    def is_available() -> bool:
        return uses_cpu_devices()

    @staticmethod
    def name() -> str:
        return "xla_cpu"


def accelerator_for(strategy: str, chosen: Any) -> Any:
    """The accelerator on which a strategy runs, given Lightning's choice.

    Under ``PJRT_DEVICE=CPU``, for ``accelerator="auto"`` or ``"cpu"``, Lightning chooses its CPU accelerator, which is
    replaced by XLA's CPU devices.

    Raises:
        StrategyUnavailableError: It is not an XLA accelerator, or ``PJRT_DEVICE`` selects another one.
    """
    if chosen is None or isinstance(chosen, XLACPUAccelerator | XLAAccelerator):
        return chosen
    name = type(chosen).__name__
    if isinstance(chosen, FabricCPUAccelerator) or name == "CPUAccelerator":
        if uses_cpu_devices():
            accelerator = XLACPUAccelerator()
            # Fabric keeps the accelerator that it has chosen, and calls only this method of it.
            chosen.setup_device = accelerator.setup_device
            return accelerator
        raise StrategyUnavailableError(
            f"strategy {strategy!r} runs on XLA devices, and the accelerator is 'cpu'.\n"
            "On a TPU host write accelerator='tpu'; to try it on the CPU, set PJRT_DEVICE=CPU and CPU_NUM_DEVICES=2 "
            "(or more) before Python starts."
        )
    raise StrategyUnavailableError(
        f"strategy {strategy!r} runs on XLA devices, and the accelerator is {name}.\n"
        "Write accelerator='tpu', or see `fsdp list` for a strategy for this hardware."
    )
