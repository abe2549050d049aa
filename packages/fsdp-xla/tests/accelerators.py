"""What test_accelerator.py runs: which accelerator, devices and precision a strategy gets from Lightning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.accelerators import XLAAccelerator as FabricXLAAccelerator
from lightning.fabric.strategies import XLAFSDPStrategy as LightningsXLAFSDPStrategy
from lightning.pytorch.accelerators import XLAAccelerator

from fsdp_xla import XLACPUAccelerator, XLAFSDPStrategy
from fsdp_xla.fabric import XLAFSDPStrategy as FabricXLAFSDPStrategy
from xla_process import save_cases


def told(strategy: Any) -> list[Any]:
    devices = [str(device) for device in strategy.parallel_devices]
    return [type(strategy.accelerator).__name__, strategy.num_processes, devices]


def trainer(strategy: Any = "xla_fsdp", **kwargs: Any) -> Any:
    quiet: dict[str, Any] = {"devices": 2, "logger": False, "enable_checkpointing": False}
    return L.Trainer(strategy=strategy, **{**quiet, **kwargs}).strategy


def precisions() -> list[str]:
    asked: dict[str, Any] = {"precision": "bf16-mixed"}
    return [
        trainer(**asked).precision_plugin.precision,
        trainer(XLAFSDPStrategy(), **asked).precision_plugin.precision,
        L.Fabric(strategy="xla_fsdp", devices=2, **asked).strategy.precision.precision,
        L.Fabric(strategy=FabricXLAFSDPStrategy(), devices=2, **asked).strategy.precision.precision,
    ]


def as_on_a_tpu() -> None:
    """Let Lightning's accelerator count two devices: nothing here has a chip that it could find."""
    for one in (FabricXLAAccelerator, XLAAccelerator):
        one.auto_device_count = staticmethod(lambda: 2)
        one.is_available = staticmethod(lambda: True)


def on_a_tpu() -> list[Any]:
    as_on_a_tpu()
    strategy = trainer(accelerator="tpu", precision="bf16-mixed")
    return [*told(strategy), strategy.precision_plugin.precision]


def fabric_on_a_tpu() -> list[Any]:
    as_on_a_tpu()
    strategy = L.Fabric(strategy="xla_fsdp", accelerator="tpu", devices=2, precision="bf16-mixed").strategy
    return [*told(strategy), strategy.precision.precision]


def spmd_fabric_on_a_tpu() -> list[Any]:
    as_on_a_tpu()
    strategy = L.Fabric(strategy="xla_fsdp_spmd", accelerator="tpu", devices=2).strategy
    return [*told(strategy), isinstance(strategy, LightningsXLAFSDPStrategy)]


def used_before() -> None:
    torch.zeros(1, device="xla").cpu()
    L.Fabric(strategy="xla_fsdp", devices=2).launch(lambda fabric: None)


if __name__ == "__main__":
    save_cases(
        {
            "auto": lambda: told(trainer()),
            "cpu": lambda: told(trainer(accelerator="cpu")),
            "given": lambda: told(trainer(accelerator=XLACPUAccelerator(), devices=-1)),
            "fabric": lambda: told(L.Fabric(strategy="xla_fsdp", devices=2).strategy),
            "precision": precisions,
            "tpu": on_a_tpu,
            "tpu fabric": fabric_on_a_tpu,
            "tpu fabric, SPMD": spmd_fabric_on_a_tpu,
            "used before": used_before,  # last: XLA can't be started anew
        },
        Path(sys.argv[2]),
    )
