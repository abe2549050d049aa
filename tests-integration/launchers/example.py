"""What the example has written, and what one process of plain torch does: no code of ours is in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

__all__ = ["GLOBAL_BATCH", "SCRIPT", "assert_as_one_process", "said"]

SCRIPT = Path(__file__).parents[2] / "docs/examples/many_machines.py"
TOLERANCE = 1e-5  # fp32: the order of additions differs between one process and several
GLOBAL_BATCH, ROWS = 8, 64


def said(told: str, front_end: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"front_end"')]
    return [one for one in lines if one["front_end"] == front_end]


def order_of(epoch: int) -> list[int]:
    """The rows of an epoch, as torch's DistributedSampler shuffles them."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()


def of_one_process(steps: int) -> tuple[list[list[int]], list[float]]:
    """The rows and the loss of each step of one process of plain torch."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    order = [row for epoch in range(math.ceil(steps * GLOBAL_BATCH / ROWS)) for row in order_of(epoch)]
    batches, losses = [], []
    for step in range(steps):
        batches.append(order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        rows = x[batches[-1]]
        loss = nn.functional.mse_loss(net(rows), rows.sum(1, keepdim=True))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return batches, losses


def assert_as_one_process(lines: list[dict[str, Any]], steps: range) -> None:
    """The rows of each step are those of one process, and the mean of the losses is its loss."""
    batches, losses = of_one_process(steps.stop)
    for step in steps:
        own = [one for one in lines if one["step"] == step]
        assert sorted(row for one in own for row in one["rows"]) == sorted(batches[step]), f"step {step}"
        mean = sum(one["loss"] for one in own) / len(own)
        assert mean == pytest.approx(losses[step], abs=TOLERANCE), f"step {step}"
