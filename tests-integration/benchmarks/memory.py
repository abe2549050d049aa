"""How much memory parameters, gradients and optimizer state take on a rank during a step. A script that each rank runs.

torch's own tracker (``torch.distributed._tools``, private; checked on torch 2.13) sorts every live tensor of a step by
what it is. It looks before and after each block is gathered, used, freed and reduced, in forward and backward, which
is when these kinds of memory grow and shrink. Optimizer state is counted apart, because the tracker takes all that
happens inside ``optimizer.step`` for it, and Lightning runs forward and backward there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from contenders import HandShardedModule, Module, Step, by_trainer, model_parallel
from lightning.pytorch.strategies import Strategy
from ranks import be_a_rank
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformer import Size, transformer

__all__ = ["largest_block"]

HELD = ("Sharded Param", "Unsharded Param", "Sharded Grad", "Unsharded Grad", "Optimizer State")
IN_TRANSIT = ("All Gather", "Reduce Scatter")
MEASURED_STEP = 2  # the optimizer state is there since the first


class _Watch(pl.Callback):
    """Tracks one step."""

    def __init__(self) -> None:
        self.snapshots: list[dict[str, int]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == MEASURED_STEP:
            root = next(module for module in pl_module.modules() if isinstance(module, FSDPModule))
            self.tracker = FSDPMemTracker(root)
            self.tracker.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == MEASURED_STEP:
            taken = [self.tracker.get_tracker_snapshot("current")]
            self.tracker.__exit__(None, None, None)
            for stats in self.tracker.memory_tracking.values():
                taken += [snapshot for snapshots in stats.snapshots.values() for snapshot in snapshots]
            state = [t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor)]
            own = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in state)
            cpu = torch.device("cpu")
            for snapshot in taken:
                kinds = {str(getattr(kind, "value", kind)): count for kind, count in snapshot[cpu].items()}
                self.snapshots.append({**kinds, "Optimizer State": own})


def largest_block(size: Size) -> tuple[int, int]:
    """Bytes of the whole model's parameters, and of the largest unit's: a block, or what is outside the blocks."""
    model = transformer(size)
    total = sum(p.nbytes for p in model.parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    return total, max(*blocks, total - sum(blocks))


def peak(snapshots: list[dict[str, int]], kinds: tuple[str, ...]) -> int:
    """The greatest sum of some kinds at any one moment, in bytes."""
    return max(sum(snapshot.get(kind, 0) for kind in kinds) for snapshot in snapshots)


def measure(strategy: str, size: Size) -> dict[str, Any]:
    """Track one step under our strategy and one under Lightning's ModelParallelStrategy.

    Returns:
        What the rank with the larger ratio found.
    """

    def enough(step: int, loss: object) -> bool:
        return step < MEASURED_STEP

    after_step: Step = enough
    parameters, block = largest_block(size)
    total = 4 * parameters  # fp32 parameters, as many gradients, and AdamW's two moments
    result: dict[str, Any] = {"size": asdict(size), "total": total, "largest block": block}
    contenders: list[tuple[str, str | Strategy, Module]] = [
        ("fsdp2", strategy, Module(size)),
        ("ModelParallelStrategy", model_parallel(), HandShardedModule(size)),
    ]
    for name, chosen, module in contenders:
        watch = _Watch()
        by_trainer(size, after_step, chosen, module, (watch,))
        allowed = total / dist.get_world_size() + block
        held, with_buffers = peak(watch.snapshots, HELD), peak(watch.snapshots, HELD + IN_TRANSIT)
        result[name] = {
            "after the step": {kind: watch.snapshots[0].get(kind, 0) for kind in HELD + IN_TRANSIT},
            "peak": held,
            "ratio": held / allowed,
            "peak with buffers in transit": with_buffers,
            "ratio with buffers in transit": with_buffers / allowed,
        }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, result)
    return dict(max(by_rank, key=lambda of: of["fsdp2"]["ratio"]))


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    be_a_rank(lambda: measure(args.strategy, Size()), args.out)


if __name__ == "__main__":
    main()
