"""What a rank holds after a step, and the collectives of a step, on a mesh. A script that each rank runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from collectives import Collectives
from contenders import Train
from held_memory import GATHERED, HELD, REDUCED, HeldMemory
from ranks import be_a_rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformer import Size, transformer
from ways import WAYS, Way, contenders_of, plan

__all__ = ["on_paper"]

COUNTED, WEIGHED = 2, 3  # steps: the optimizer's state is there since the first


class Watch:
    """Called after each step: counts the collectives of one, tracks the memory of the next, then ends the training."""

    collectives: Collectives
    held: HeldMemory

    def __call__(self, step: int, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> bool:
        if step == COUNTED - 1:
            self.collectives = Collectives()
            self.collectives.__enter__()
        elif step == COUNTED:
            self.collectives.__exit__(None, None, None)
            self.held = HeldMemory(model, optimizer)
            self.held.__enter__()
        elif step == WEIGHED:
            self.held.__exit__(None, None, None)
            # those of a single shard are reduced by no reduce-scatter, by which the others are met
            local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
            storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, local)}
            self.held.moments[-1][REDUCED] = sum(storages.values())
            return False
        return True


def on_paper(size: Size, way: Way) -> float:
    """Bytes of parameters, gradients and AdamW's two moments per rank, if all divide evenly.

    A layer of the plan is divided among tensor-parallel ranks, but for the bias of one divided by rows, which is added
    to their sum; what is left is divided among the ranks that shard.
    """
    model = transformer(size)
    divided = {f"{name}.weight" for name in plan()} | {"up.bias"}
    names = {id(p): name for block in model.blocks for name, p in block.named_parameters()}
    return sum(
        4 * p.nbytes / way.shard / (way.tensor if names.get(id(p)) in divided else 1) for p in model.parameters()
    )


def measure(way: Way, size: Size) -> dict[str, Any]:
    """Count for ``fsdp2`` and for the loop by hand.

    Returns:
        What the rank with the most memory under ``fsdp2`` found.
    """
    found: dict[str, Any] = {}
    paper = on_paper(size, way)
    for name, train in contenders_of(way).items():
        found[name] = _of(train, size, paper)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    worst = max(by_rank, key=lambda of: of["fsdp2"]["held"])
    return {"size": asdict(size), "on paper": paper, "contenders": worst}


def _of(train: Train, size: Size, paper: float) -> dict[str, Any]:
    watch = Watch()
    train(size, watch)
    after = watch.held.moments[-1]
    held = sum(after[kind] for kind in HELD if kind != GATHERED)
    return {"held": held, "ratio": held / paper, "by kind": after, "collectives": dict(watch.collectives.counted)}


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    be_a_rank(lambda: measure(WAYS[args.way], Size()), args.out)


if __name__ == "__main__":
    main()
