"""How much memory parameters, gradients and optimizer state take on a rank in a step. A script that each rank runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contenders import STRATEGIES, contenders
from held_memory import HELD, HeldMemory
from ranks import be_a_rank
from torch import Tensor, nn
from torch.optim import Optimizer
from transformer import Size, transformer

__all__ = ["largest_block"]

MEASURED_STEP = 2  # the optimizer state is there since the first


class Watch:
    """Called after each step: tracks one, then ends the training."""

    held: HeldMemory

    def __call__(self, step: int, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> bool:
        if step == MEASURED_STEP - 1:
            self.held = HeldMemory(model, optimizer)
            self.held.__enter__()
        if step < MEASURED_STEP:
            return True
        self.held.__exit__(None, None, None)
        return False


def largest_block(size: Size) -> tuple[int, int]:
    """Bytes of the whole model's parameters, and of the largest unit's: a block, or what is outside the blocks."""
    model = transformer(size)
    total = sum(p.nbytes for p in model.parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    return total, max(*blocks, total - sum(blocks))


def check(moments: list[dict[str, int]], share: float, block: int) -> None:
    """Refuse to give a figure if something that has to be there was not met, as after a change in torch."""
    for kind, least in zip(HELD, (share, block, block, share, 2 * share), strict=True):
        lasting = kind not in ("gathered parameters", "unreduced gradients")
        met = moments[-1][kind] if lasting else max(moment[kind] for moment in moments)
        if met < 0.9 * least:  # a rank may have a little less than its share
            raise RuntimeError(f"{met} bytes of {kind} were met, of at least {least:.0f} that have to be there")


def measure(strategy: str, size: Size) -> dict[str, Any]:
    """Track one step of each contender.

    Returns:
        What the rank with the largest ratio under ``strategy`` found.
    """
    parameters, block = largest_block(size)
    total = 4 * parameters  # fp32 parameters, as many gradients, and AdamW's two moments
    allowed = total / dist.get_world_size() + block
    found: dict[str, Any] = {}
    for name, train in contenders(strategy).items():
        watch = Watch()
        train(size, watch)
        moments = watch.held.moments
        check(moments, parameters / dist.get_world_size(), block)
        held = max(moments, key=lambda moment: sum(moment[kind] for kind in HELD))
        everything = max(moments, key=lambda moment: sum(moment.values()))
        peak, with_buffers = sum(held[kind] for kind in HELD), sum(everything.values())
        found[name] = {
            "after the step": moments[-1],
            "at the peak": held,
            "peak": peak,
            "ratio": peak / allowed,
            "at the peak with buffers in transit": everything,
            "peak with buffers in transit": with_buffers,
            "ratio with buffers in transit": with_buffers / allowed,
        }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    worst = max(by_rank, key=lambda of: of[strategy]["ratio"])
    return {"size": asdict(size), "total": total, "largest block": block, "contenders": worst}


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    be_a_rank(lambda: measure(args.strategy, Size()), args.out)


if __name__ == "__main__":
    main()
