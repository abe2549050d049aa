"""The model, the batches and the optimizer that every contender of the benchmarks trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from device import ACCELERATOR, own_device
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "Size", "Transformer", "batch", "optimizer", "transformer"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batches are.

    Attributes:
        width: The length of the vector at each position.
        layers: Transformer blocks.
        vocabulary: Distinct tokens.
        windows: Sequences per process and step.
        context: Tokens per sequence.
    """

    width: int = 256
    layers: int = 8
    vocabulary: int = 256
    windows: int = 2
    context: int = 128


class Block(nn.Module):
    """Causal attention and an MLP, each over a normalised input that is added back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Blocks in a ``ModuleList``, so that the ``"auto"`` wrap policy and a hand-written loop shard the same units."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each next token of (batch, time)."""
        x = self.embed(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def transformer(size: Size) -> Transformer:
    """Build the model with the same weights on every call and every rank, on this rank's device.

    On a CPU, a model of 4 GB takes seconds to initialise, which a card would wait for.
    """
    with torch.random.fork_rng(devices=[own_device()] if ACCELERATOR == "cuda" else []), own_device():
        torch.manual_seed(0)
        return Transformer(size)


def batch(size: Size, step: int, rank: int) -> Tensor:
    """The tokens of one step on one rank: int64 (windows, context + 1)."""
    dice = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(size.vocabulary, (size.windows, size.context + 1), generator=dice)


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW, with the large ``eps`` under which rounding is not amplified, so that losses can be compared."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
