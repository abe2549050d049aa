"""Trains a model whose weights are much smaller and larger than its activations, for a look at XLA's program."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

ROWS, WIDTH, HIDDEN = 16, 64, 256


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def collectives(folder: Path) -> Counter[str]:
    """The collectives of the largest program, by what they give, such as ``all-gather f32[64,256]``."""
    programs = folder.glob("*after_optimizations.txt")
    program = max(programs, key=lambda path: path.stat().st_size).read_text()
    found = re.findall(r" = (\w+\[[\d,]*\])\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(", program)
    return Counter(f"{kind} {shape}" for shape, kind in found)


def main(out: str, folder: str, recomputed: str) -> None:
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
    from spmd_runs import new_fabric

    fabric: Any = new_fabric({"activation_checkpointing_policy": {Part}} if recomputed else {})
    net = nn.Sequential(nn.Sequential(Part(), Part(), Part()), nn.Linear(WIDTH, 8))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        x, y = fabric.strategy.batch_to_devices((torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8)))
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    torch.save(collectives(Path(folder)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
