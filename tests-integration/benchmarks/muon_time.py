"""Time of Muon's steps: on owners, over DTensors, and gathered on every rank. A script that each rank runs."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from contenders import shard_in_place
from device import ACCELERATOR, finish, own_device
from lightning.fabric import Fabric
from ranks import be_a_rank
from step_time import compare
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformer import Size, batch, transformer

OWNERS, DTENSORS, EVERYWHERE = "owner-compute", "over DTensors", "gathered on every rank"


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon trains, as is usual: the blocks' matrices, and neither embeddings nor the head."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


def muon(parameters: list[nn.Parameter]) -> torch.optim.Muon:
    """Torch's own."""
    return torch.optim.Muon(parameters, lr=1e-3)


class Everywhere:
    """Gathers each gradient on every rank, which takes the whole step and keeps its own rows."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shards = parameters
        self.wholes = [nn.Parameter(p.full_tensor().detach().clone()) for p in parameters if isinstance(p, DTensor)]
        self.muon = muon(self.wholes)

    @torch.no_grad()
    def step(self) -> None:
        """As an optimizer's."""
        for whole, shard in zip(self.wholes, self.shards, strict=True):
            assert isinstance(shard, DTensor)
            assert isinstance(shard.grad, DTensor)
            whole.grad = shard.grad.full_tensor()
        self.muon.step()
        for whole, shard in zip(self.wholes, self.shards, strict=True):
            assert isinstance(shard, DTensor)
            now = distribute_tensor(whole.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().copy_(now.to_local())


#: A model, what runs its backward passes, and an optimizer's step.
Contender = tuple[nn.Module, Callable[[Tensor], Any], Callable[[], Any]]


def contenders(size: Size) -> dict[str, Contender]:
    """Each by its name."""
    made: dict[str, Contender] = {}
    fabric = Fabric(accelerator=ACCELERATOR, devices=dist.get_world_size(), strategy="fsdp2")
    fabric.launch()
    plain = transformer(size)
    model, optimizer = fabric.setup(plain, muon(matrices(plain)))
    made[OWNERS] = model, fabric.backward, optimizer.step
    for name, make in ((DTENSORS, muon), (EVERYWHERE, Everywhere)):
        by_hand = shard_in_place(transformer(size).to(own_device()))
        made[name] = by_hand, Tensor.backward, make(matrices(by_hand)).step
    return made


def backward(model: nn.Module, run: Callable[[Tensor], Any], size: Size, step: int) -> Tensor:
    """Give the model the gradients of a step, and return the loss."""
    model.zero_grad()
    loss: Tensor = model(batch(size, step, dist.get_rank()).to(own_device()))
    run(loss)
    return loss.detach()


def measure(size: Size, turns: int) -> dict[str, Any]:
    """Let the contenders take steps in an order shuffled for each turn; the slowest rank counts."""
    made, dice = contenders(size), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, list[Tensor]] = {name: [] for name in made}
    for turn in range(turns + 2):  # the first two allocate
        for name in dice.sample(list(made), len(made)):
            model, run, step = made[name]
            losses[name].append(backward(model, run, size, turn))
            finish()
            dist.barrier()
            started = perf_counter()
            step()
            finish()
            if turn >= 2:
                seconds[name].append(perf_counter() - started)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, seconds)
    slowest = {name: [max(of) for of in zip(*(rank[name] for rank in by_rank), strict=True)] for name in made}
    ended = torch.stack([torch.stack(of) for of in losses.values()])
    apart = float((ended.amax(0) - ended.amin(0)).max())
    if apart > 1e-2:  # Muon orthogonalises in bf16
        raise RuntimeError(f"the contenders don't train the same: their losses differ by {apart:.1e}")
    return {
        "ranks": dist.get_world_size(),
        "losses differ by": apart,
        "milliseconds": {name: 1000 * median(times) for name, times in slowest.items()},
        "ratios": {f"{OWNERS} ÷ {name}": compare(slowest, OWNERS, name) for name in (EVERYWHERE, DTENSORS)},
    }


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    be_a_rank(lambda: measure(Size(), args.turns), args.out)


if __name__ == "__main__":
    main()
