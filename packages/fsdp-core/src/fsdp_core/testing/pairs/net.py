"""The model, its data and its optimizers: plain torch, for the ranks and for the one process they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import FEATURES
from fsdp_core.testing.pairs.dimensions import Configuration

__all__ = ["CLIP", "MICRO_BATCHES", "Mixture", "PairsNet", "batches", "is_last", "loss_of", "new_net", "optimizers"]

#: Micro-batches of a run. Neither 2 nor 3 divides them, so that the last step of an accumulation has fewer.
MICRO_BATCHES = 5

#: The limits for clipping, so small that gradients are clipped in every step.
CLIP = {"norm": 0.05, "largest": 0.01, "value": 0.003}


class Mixture(nn.Module):
    """Experts, stacked in parameters of three dimensions, which a router chooses and weighs for each row."""

    def __init__(self, experts: int = 4, width: int = 3) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(experts, FEATURES, width) / 2)
        self.back = nn.Parameter(torch.randn(experts, width, FEATURES) / 2)

    def forward(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each row.

        Args:
            rows: Shape ``(n, FEATURES)``.
            indices: The experts that are chosen, of shape ``(n, k)``.
            weights: Shape ``(n, k)``.
        """
        hidden = torch.tanh(torch.einsum("nf,nkfw->nkw", rows, self.into[indices]))
        results = torch.einsum("nkw,nkwf->nkf", hidden, self.back[indices])
        return (results * weights[..., None]).sum(1).to(rows.dtype)


class PairsNet(nn.Module):
    """Blocks between two layers that may be tied, experts, parameters of 0 to 3 dimensions, buffers, and odd sizes.

    Args:
        configuration: What is frozen, tied, or not used in some steps.
    """

    scale: Tensor
    calls: Tensor

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, FEATURES, bias=False)
        self.table = nn.Embedding(FEATURES + 1, FEATURES)
        self.blocks = nn.ModuleList(oracle.Block(width=8) for _ in range(2))
        self.side = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, FEATURES))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.mixture = Mixture()
        if configuration["tied"] == "yes":
            self.out.weight = self.inp.weight
        if configuration["trained"] == "not a layer":
            self.side[0].requires_grad_(False)
            self.blocks[0].up.requires_grad_(False)
        if configuration["trained"] == "not a block":
            self.blocks[0].requires_grad_(False)
        self.seldom = configuration["trained"] == "in some steps"
        self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, index: int) -> Tensor:
        """Return the output for the micro-batch of this index."""
        if self.training:
            self.calls += 1
        positive = (x > 0).sum(-1)  # by which experts are chosen, so that no precision chooses others
        rows = self.table(positive)
        x = self.inp(x)
        x = x * self.scale.to(x.dtype) + rows  # keeps activations in half precision under mixed precision
        for block in self.blocks:
            x = block(x)
        if not self.seldom or index % 2 == 0:
            x = x + self.side(x)
        x = x + self.mixture(x, torch.stack([positive % 4, (positive + 1) % 4], -1), rows[:, :2].softmax(-1))
        output: Tensor = self.out(x * self.temperature)
        return output


def new_net(configuration: Configuration) -> PairsNet:
    """The net with its initial weights, which are the same everywhere."""
    with oracle.seeded(11):
        net = PairsNet(configuration)
    return net.double() if configuration["precision"] == "double" else net


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The global micro-batches, each of shape ``(BATCH, FEATURES)``."""
    return [(x.to(dtype), y.to(dtype)) for x, y in oracle.global_batches(MICRO_BATCHES)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the samples, so that the mean over equal shares of them is the same."""
    return mse_loss(output, target)


def is_last(index: int, accumulate: int) -> bool:
    """Whether a step follows this micro-batch, as under the Trainer: the last step may have fewer micro-batches."""
    return (index + 1) % accumulate == 0 or index + 1 == MICRO_BATCHES


def optimizers(label: str, net: Any) -> list[torch.optim.Optimizer]:
    """The optimizers over a net, each over parameters of all kinds."""
    if label == "sgd":
        return [torch.optim.SGD(net.parameters(), lr=0.05)]
    if label == "momentum":
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)]
    if label == "adamw":
        return [oracle.adamw_groups(net)]
    inner = list(net.blocks.parameters())
    inner_ids = {id(parameter) for parameter in inner}
    around = [parameter for parameter in net.parameters() if id(parameter) not in inner_ids]
    # the large eps damps gradients that are zero except for rounding
    return [torch.optim.SGD(inner, lr=0.05, momentum=0.9), torch.optim.Adam(around, lr=0.01, eps=1e-3, amsgrad=True)]
