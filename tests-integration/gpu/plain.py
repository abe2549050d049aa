"""What one card's training is compared with: a loop of plain torch, which shares no code with the strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE

__all__ = [
    "COMPILED_TOLERANCE",
    "FLOAT8_TOLERANCE",
    "SEED",
    "STEPS",
    "Batches",
    "Block",
    "FrontEnd",
    "Net",
    "Trained",
    "Way",
    "differences",
    "new_net",
    "new_optimizer",
    "tolerances",
    "train_plainly",
]

FrontEnd = Literal["trainer", "fabric"]

#: All sizes are multiples of 16, which float8 units need.
ROWS, FEATURES, WIDTH, BLOCKS = 32, 32, 64, 3
#: Micro-batches of a run.
STEPS = 4
#: Seeds what dropout draws.
SEED = 11
#: A compiler fuses operations: it adds in another order, and has a tanh of its own.
COMPILED_TOLERANCE = 1e-4
#: float8 has 4 bits of mantissa: a number that is a little larger may be rounded to one that is an eighth larger.
#: Measured on a CPU: weights move by 0.11 of their movement if the first layer's inputs are rounded to bf16 before.
FLOAT8_TOLERANCE = 2**-3


@dataclass(frozen=True, kw_only=True)
class Way:
    """In which way a run trains, as far as it changes the numbers.

    Attributes:
        precision: Lightning's precision string.
        accumulate: Micro-batches per optimizer step.
        clip_norm: The largest norm of the gradient.
        clip_value: The largest absolute value of the gradient's elements.
        dropout: The probability with which a block drops an element.
        float8: Whether linear layers compute in float8.
        compiled: Whether what is compared was compiled. The loop of plain torch never is.
        factors: What the loss of each micro-batch is multiplied by.
    """

    precision: str = "32-true"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    dropout: float = 0.0
    float8: bool = False
    compiled: bool = False
    factors: tuple[float, ...] = (1.0,) * STEPS


#: By precision: the dtype of the weights that are trained, and the one in which layers compute.
DTYPES = {
    "32-true": (torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
}


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, features) to the same shape."""
        output: Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return output


class Net(nn.Module):
    """Blocks in a ``ModuleList``, which are units of their own, between two layers of the root."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.last = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, features) to the same shape."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


def new_net(way: Way) -> Net:
    """A net in host memory, with the same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return Net(way.dropout)


def new_optimizer(module: nn.Module) -> torch.optim.AdamW:
    """AdamW, with the large ``eps`` under which rounding is not amplified."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


class Batches:
    """The micro-batches of a run, in host memory: inputs, targets, and the factor of the loss.

    It is iterated as it is: the iterator of a data loader would draw a random number.
    """

    def __init__(self, way: Way) -> None:
        dice = torch.Generator().manual_seed(2)
        shape = (len(way.factors), 2, ROWS, FEATURES)
        self._batches = [
            (x, y, torch.tensor(factor))
            for (x, y), factor in zip(torch.randn(shape, generator=dice), way.factors, strict=True)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Trained(NamedTuple):
    """What a run leaves.

    Attributes:
        losses: The loss of each micro-batch.
        weights: The final weights in host memory, by name.
        scales: By what each micro-batch's loss was multiplied before its backward pass.
        final_scale: The gradient scaler's scale after the last step; ``None`` without a scaler.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    scales: list[float]
    final_scale: float | None


def train_plainly(way: Way, device: torch.device, front_end: FrontEnd) -> Trained:
    """Train in a loop of plain torch.

    Mixed precision is written out: weights are kept in fp32, cast to the compute dtype for the forward pass, and their
    gradients cast back by the backward pass of that cast.

    Args:
        way: How to train.
        device: Where to train.
        front_end: Whose casts are followed. The Trainer casts whole batches to the dtype of the weights, and computes
            the loss of what the net returns; Fabric casts what the net is called with to the compute dtype, and what
            it returns to fp32.
    """
    storage, compute = DTYPES[way.precision]
    net = new_net(way).to(device=device, dtype=storage)
    if way.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(net, config=Float8LinearConfig(emulate=device.type != "cuda"))
    optimizer = new_optimizer(net)
    scaler = torch.amp.GradScaler(device.type) if way.precision == "16-mixed" else None
    mixed = torch.autocast(device.type, dtype=compute) if storage is not compute else nullcontext()
    losses, scales = [], []
    torch.manual_seed(SEED)
    for number, batch in enumerate(Batches(way), start=1):
        x, y, factor = (part.to(device) for part in batch)
        with mixed:
            cast = {name: weight.to(compute) for name, weight in net.named_parameters()}
            output = functional_call(net, cast, (x.to(storage if front_end == "trainer" else compute),))
            loss_dtype = storage if front_end == "trainer" else torch.float32
            loss = mse_loss(output.to(loss_dtype), y.to(loss_dtype)) * factor
        losses.append(loss.item())
        scales.append(1.0 if scaler is None else scaler.get_scale())
        scaled = loss / way.accumulate if scaler is None else scaler.scale(loss / way.accumulate)
        scaled.backward()
        if number % way.accumulate:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        if way.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), way.clip_norm)
        if way.clip_value is not None:
            nn.utils.clip_grad_value_(net.parameters(), way.clip_value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    weights = {name: weight.detach().cpu() for name, weight in net.state_dict().items()}
    return Trained(losses, weights, scales, None if scaler is None else scaler.get_scale())


def tolerances(way: Way) -> dict[str, float]:
    """How large the :func:`differences` may be: rounding of the dtype in which layers compute."""
    if way.precision == "32-true":
        return dict.fromkeys(("loss", "weights"), COMPILED_TOLERANCE if way.compiled else FP32_TOLERANCE)
    return {"loss": HALF_TOLERANCE, "weights": FLOAT8_TOLERANCE if way.float8 else HALF_TOLERANCE}


def differences(way: Way, run: Trained, reference: Trained) -> dict[str, float]:
    """How far a run is from another one.

    Returns:
        ``loss``: the largest difference of losses, relative to the loss. ``weights``: the difference of the weights,
        relative to how far the other run has moved them, as norms over all weights: a wrong learning rate changes
        little of a weight, and much of its movement. ``weight``: the largest difference of a weight.
    """
    before = new_net(way).state_dict()
    assert run.weights.keys() == reference.weights.keys(), f"other names: {sorted(run.weights)}"
    assert len(run.losses) == len(reference.losses), f"{len(run.losses)} losses instead of {len(reference.losses)}"
    apart = torch.cat([(run.weights[name].double() - reference.weights[name].double()).flatten() for name in before])
    moved = torch.cat([(reference.weights[name].double() - before[name].double()).flatten() for name in before])
    relative = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(run.losses, reference.losses, strict=True)]
    return {
        "loss": max(relative),
        "weights": float(apart.norm() / moved.norm()),
        "weight": float(apart.abs().max()),
    }
