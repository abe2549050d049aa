"""The suite's models, their data, and the oracle: one unsharded process of plain torch, without any of our code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

__all__ = [
    "BATCH",
    "FEATURES",
    "FP32_TOLERANCE",
    "HALF_TOLERANCE",
    "RESUME_TOLERANCE",
    "WIDE",
    "Block",
    "Net",
    "Trained",
    "adamw_groups",
    "dataset",
    "global_batches",
    "is_block",
    "is_layer",
    "momentum",
    "new_net",
    "seeded",
    "sgd",
    "torch_policy",
    "train_plain",
]

#: For fp32. The order of additions differs between one process and several; measured differences stay below 2e-6.
FP32_TOLERANCE = 1e-5

#: For a run in fp32 that resumes on another number of ranks; measured differences stay below 3e-7.
RESUME_TOLERANCE = 1e-6

#: For half precision, with 8 (bf16) or 11 (fp16) bits of mantissa: a loss is accurate to a few units of 2**-8.
HALF_TOLERANCE = 3e-2

#: A block's inner width for tests of shard sizes, large compared with the padding of libraries, about 100 elements.
WIDE = 701

BATCH, FEATURES = 12, 6  # 12 rows divide by 1, 2, 3 and 4 ranks

#: The loss of each batch, and the final state by name.
Trained = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """A residual block of uneven sizes with a 0-dim gain."""

    def __init__(self, dropout: float = 0.0, width: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, width)
        self.down = nn.Linear(width, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.gain * self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return output


class Net(nn.Module):
    """Blocks in a ModuleList, a tied pair at the root, a buffer, and a frozen layer."""

    scale: Tensor

    def __init__(self, dropout: float = 0.0, blocks: int = 3, width: int = 7) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, FEATURES, bias=False)
        self.blocks = nn.ModuleList(Block(dropout, width) for _ in range(blocks))
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.out.weight = self.inp.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) * self.scale
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.out(self.frozen(x))
        return output


_drawing = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context that seeds torch's random-number generator, also for ranks that share one.

    Threads enter it one at a time, so it must not contain a collective.
    """
    with _drawing:
        torch.manual_seed(seed)
        yield


def new_net(**kwargs: Any) -> Net:
    """A net with the initial weights of every run of the suite."""
    with seeded(1):
        return Net(**kwargs)


def dataset(size: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of shape ``(FEATURES,)``, always the same."""
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(FEATURES, generator=g), torch.randn(FEATURES, generator=g)) for _ in range(size)]


def global_batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The global batch of each step: inputs and targets of shape ``(BATCH, FEATURES)``."""
    data = dataset(BATCH * steps)
    return [
        (torch.stack([x for x, _ in data[i : i + BATCH]]), torch.stack([y for _, y in data[i : i + BATCH]]))
        for i in range(0, BATCH * steps, BATCH)
    ]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD without state."""
    return torch.optim.SGD(module.parameters(), lr=0.05)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with one state tensor per parameter."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw_groups(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with param groups by ndim, as usual. The large eps damps gradients that are zero except for rounding."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=1e-3,
    )


def train_plain(
    steps: int,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    net: nn.Module | None = None,
) -> Trained:
    """Train in this process on global batches.

    Args:
        steps: The number of batches.
        make_optimizer: Builds the optimizer over the net.
        accumulate: The number of micro-batches per optimizer step.
        clip_norm: The maximum norm of the gradient.
        clip_value: The maximum absolute value of the gradient's elements.
        net: Trained in place; :func:`new_net` when ``None``.
    """
    net = net or new_net()
    optimizer = make_optimizer(net)
    losses = []
    for i, (x, y) in enumerate(global_batches(steps)):
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            if clip_value is not None:
                nn.utils.clip_grad_value_(net.parameters(), clip_value)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def is_block(module: nn.Module) -> bool:
    """A policy for wrapping or activation checkpointing, as a function of the module."""
    return isinstance(module, Block)


def is_layer(module: nn.Module) -> bool:
    """A policy that makes units of single layers, and of the blocks around them."""
    return isinstance(module, (Block, nn.Linear, nn.LayerNorm))


def torch_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A wrap policy with the signature of those in :mod:`torch.distributed.fsdp.wrap`."""
    return True if recurse else isinstance(module, Block)
