"""Small models with experts, for tests of expert parallelism; they know nothing of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import FEATURES

CHOICES, WIDTH = 2, 5

#: The plan of :class:`MixedNet`: each block's experts, called in one of the two ways.
PLAN = {"blocks.0.experts": "top_k", "blocks.1.experts": "sorted"}


class Experts(nn.Module):
    """Stacked layers with biases. ``forward`` sees tokens that are sorted by expert."""

    def __init__(self, number: int, features: int = FEATURES) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, features, WIDTH) / 2)
        self.up_bias = nn.Parameter(torch.randn(number, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(number, WIDTH, features) / 2)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = tokens.split(counts.tolist())
        assert len(parts) == self.num_experts == len(self.up)
        return torch.cat([self.compute(i, part) for i, part in enumerate(parts)])

    def compute(self, expert: int, tokens: Tensor) -> Tensor:
        return torch.tanh(tokens @ self.up[expert] + self.up_bias[expert]) @ self.down[expert]


class ChoosingExperts(Experts):
    """The same; ``forward`` sees what the router has chosen for each token."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        results = torch.zeros_like(tokens)
        for expert in indices.unique().tolist():
            rows, choices = torch.where(indices == expert)
            weighted = self.compute(expert, tokens[rows]) * weights[rows, choices, None]
            results = results.index_add(0, rows, weighted)
        return results


class Router(nn.Module):
    """A linear router of the top experts, with a bias towards some."""

    favour: Tensor

    def __init__(self, number: int, favoured: int, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, number)
        self.register_buffer("favour", torch.where(torch.arange(number) < favoured, 100.0, 0.0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.linear(tokens)
        indices = (scores + self.favour).topk(CHOICES).indices
        return scores, indices, scores.gather(-1, indices).softmax(-1)


class MixedBlock(nn.Module):
    """A residual block of experts, and of a layer that all tokens use. It keeps what the router has chosen."""

    def __init__(self, *, sorts: bool, experts: int = 4, favoured: int = 0, features: int = FEATURES) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.router = Router(experts, favoured, features)
        self.experts = Experts(experts, features) if sorts else ChoosingExperts(experts, features)
        self.shared = nn.Linear(features, features)
        self.scores = self.indices = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        self.scores, self.indices, weights = self.router(tokens)
        indices = self.indices
        if isinstance(self.experts, ChoosingExperts):
            mixed = self.experts(tokens, indices, weights)
        else:
            order = indices.flatten().argsort(stable=True)
            counts = torch.bincount(indices.flatten(), minlength=self.scores.shape[-1])
            results = self.experts(tokens[order // CHOICES], counts) * weights.flatten()[order, None]
            mixed = torch.zeros_like(tokens).index_add(0, order // CHOICES, results)
        output: Tensor = x + self.shared(tokens).view_as(x) + mixed.view_as(x)
        return output


class MixedNet(nn.Module):
    """Two blocks with experts, called in different ways.

    Args:
        experts: The number of experts of a block.
        favoured: How many of them, the first ones, get all tokens; 0 for no preference.
    """

    def __init__(self, experts: int = 4, favoured: int = 0) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(
            MixedBlock(sorts=sorts, experts=experts, favoured=favoured) for sorts in (False, True)
        )
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.out(x)
        return output


def balance(block: MixedBlock, shares: Tensor) -> Tensor:
    """The loss that balances a block's router.

    Args:
        block: The block, after its forward pass.
        shares: By expert, its share of the tokens.
    """
    return shares.numel() * (shares * block.scores.softmax(-1).mean(0)).sum()


def shares_of(block: MixedBlock) -> Tensor:
    """By expert, its share of the tokens of the block's last forward pass."""
    counts = torch.bincount(block.indices.flatten(), minlength=block.scores.shape[-1])
    return counts.to(block.scores.dtype) / counts.sum()


def new_net(**arguments: Any) -> MixedNet:
    with oracle.seeded(3):
        return MixedNet(**arguments)
