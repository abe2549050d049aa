"""Saves in the background under Fabric and ends without waiting. Takes a strategy's name, a folder, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from train import say  # type: ignore[import-not-found]  # beside it

import fsdp_core
from fsdp_core.testing.disks import disk

used_to_the_end = disk(seconds=0.3)


def main(strategy: str, folder: Path, how: str) -> None:
    """Save twice, load the second, save it again, and end; on a disk that is full, if that is to fail."""
    used = used_to_the_end.__enter__()
    made = fsdp_core.resolve(strategy, "fabric")(async_save=True)
    fabric = L.Fabric(strategy=made, accelerator="cpu", devices=2)
    fabric.launch()
    net = torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    for step in (1, 2):
        fabric.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(folder / f"{step}", {"model": model, "optimizer": optimizer, "step": step})
    found = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "2", found)
    used.room = 100 if how == "fails" else None
    fabric.save(folder / "2", {"model": model, "optimizer": optimizer, "step": 3})
    say(loaded=found["step"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
