"""What the examples of the engines train, in one process of plain torch that nothing disturbs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DistributedSampler

__all__ = ["AFTERWARDS", "losses_of_one_process"]

#: Where the loss over all data after the last step is.
AFTERWARDS = -1

ROWS, BATCH, RANKS = 64, 8, 2


def losses_of_one_process(epochs: int) -> dict[int, float]:
    """The loss of each step of the examples, on the batches of two ranks together.

    Args:
        epochs: How many times over the data.

    Returns:
        Losses by step, from 1, and that of all data after the last one, at :data:`AFTERWARDS`.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses: dict[int, float] = {}
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(range(ROWS), RANKS, rank, shuffle=True, seed=0)  # type: ignore[arg-type]
        for rank in range(RANKS)
    ]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        by_rank = [list(sampler) for sampler in samplers]
        for start in range(0, ROWS // RANKS, BATCH):
            rows = [row for of_rank in by_rank for row in of_rank[start : start + BATCH]]
            optimizer.zero_grad()
            loss = mse_loss(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses[len(losses) + 1] = loss.item()
    with torch.no_grad():
        losses[AFTERWARDS] = mse_loss(net(x), y).item()
    return losses
