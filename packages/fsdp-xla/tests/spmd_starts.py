"""Starts in processes that are not as they should be, or in which the number of devices is left open."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


def started_without_spmd() -> Any:
    torch.zeros(2).to("xla")
    return start()


def after_a_backward_pass() -> Any:
    torch.zeros(2, requires_grad=True).sum().backward()
    return start()


def devices_left_open() -> Any:
    return start(3)


def seeded_again() -> Any:
    """What dropout keeps on the devices, after seeds from before SPMD was started, and after others."""
    from lightning import seed_everything

    def kept(seed: int) -> list[float]:
        seed_everything(seed, verbose=False)
        start()
        return torch.nn.functional.dropout(torch.ones(64, device="xla")).tolist()

    return [kept(seed) for seed in (3, 3, 4, 3)]


def start(devices: int = 4) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="xla_fsdp_spmd", devices=devices)
    fabric.launch()
    mesh = fabric.strategy.runtime.device_mesh  # type: ignore[attr-defined]
    return {"mesh": dict(mesh.shape()), "world": fabric.world_size, "variable": os.environ["CPU_NUM_DEVICES"]}


def main(out: str, case: str) -> None:
    if case == "started_without_spmd":
        import torch_xla  # noqa: F401
    try:
        result = globals()[case]()
    except Exception as error:
        result = (type(error).__name__, str(error))
    torch.save(result, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
