"""Times the steps of one contender on XLA's CPU devices, in a process of its own; see xla.py.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_step_time.py spmd|classic by-hand|fabric|trainer STEPS

Prints ``{"seconds": …, "compiles": …, "loss": …}``: of a step after the first ones, the programs compiled in all, and
the last step's loss.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformer import Size, batch, optimizer, transformer

DEVICES, WARM = 2, 10
#: The windows of a step are those of all devices together.
SIZE = Size(width=128, layers=4, windows=4 * DEVICES, context=64)
#: Ranks may be threads, and torch's random generator is the process's.
building = threading.Lock()


class Clock:
    """Times the steps after the warm ones, until the devices have done the last."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began = steps, 0.0

    def __iter__(self) -> Iterator[int]:
        for step in range(WARM + self.steps):
            self.before(step)
            yield step

    def before(self, step: int) -> None:
        if step == WARM:
            xm.wait_device_ops()
            self.began = time.perf_counter()

    def report(self, loss: Tensor) -> dict[str, Any]:
        xm.wait_device_ops()
        seconds = (time.perf_counter() - self.began) / self.steps
        return {"seconds": seconds, "compiles": metrics.counter_value("UncachedCompile"), "loss": float(loss)}


def by_hand(root: nn.Module, read: Callable[[int], Tensor], steps: int) -> dict[str, Any]:
    """The shortest loop that torch_xla allows."""
    stepper, clock = optimizer(root), Clock(steps)
    for step in clock:
        loss = root(read(step))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        torch_xla.sync()
    return clock.report(loss)


def spmd_by_hand(steps: int) -> dict[str, Any]:
    import numpy
    import torch_xla.distributed.spmd as spmd
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    xr.use_spmd()
    mesh = spmd.Mesh(numpy.arange(DEVICES), (DEVICES,), ("fsdp",))

    def cut(output: Tensor, mesh: Any) -> None:
        if output.ndim:  # not the loss
            spmd.mark_sharding(output, mesh, ("fsdp",) + (None,) * (output.ndim - 1))

    def read(step: int) -> Tensor:
        tokens = batch(SIZE, step, 0).to("xla")
        spmd.mark_sharding(tokens, mesh, ("fsdp", None))
        return tokens

    model = transformer(SIZE)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = SpmdFullyShardedDataParallel(block, mesh=mesh, shard_output=cut)
    return by_hand(SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=cut), read, steps)


def classic_by_hand(steps: int) -> dict[str, Any]:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    from fsdp_xla.starting import run_ranks

    def train(_: None) -> dict[str, Any]:
        device, rank = torch_xla.device(), xr.global_ordinal()
        with building:
            model = transformer(SIZE).to(device)
        options = {"pin_layout_in_collective_ops": False}  # else no two ranks compile the same program
        for index, block in enumerate(model.blocks):
            model.blocks[index] = XlaFullyShardedDataParallel(block, **options)
        root = XlaFullyShardedDataParallel(model, **options)
        return by_hand(root, lambda step: batch(SIZE, step, 0)[rank::DEVICES].to(device), steps)

    told: dict[str, Any] = run_ranks(DEVICES, train, None)
    return told


def with_fabric(strategy: str, steps: int) -> dict[str, Any]:
    def train(fabric: Fabric) -> dict[str, Any]:
        with fabric.init_module():
            model = transformer(SIZE)
        root = fabric.setup_module(model)
        stepper, clock = fabric.setup_optimizers(optimizer(root)), Clock(steps)
        batches = loader(fabric.global_rank, fabric.world_size, steps)
        batches = fabric.setup_dataloaders(batches, use_distributed_sampler=False)
        for _, tokens in zip(clock, batches, strict=True):
            loss = root(tokens)
            stepper.zero_grad()
            fabric.backward(loss)
            stepper.step()
        return clock.report(loss)

    fabric = Fabric(strategy=strategy, devices=DEVICES)
    told: dict[str, Any] = fabric.launch(train)
    return told


class Timed(pl.LightningModule):
    """The same under the Trainer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model, self.clock = transformer(SIZE), Clock(steps)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        self.clock.before(index)
        loss: Tensor = self.model(tokens)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer(self)

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size, self.clock.steps)

    def on_train_end(self) -> None:
        told = self.clock.report(self.loss)
        if self.trainer.is_global_zero:
            print(json.dumps(told), flush=True)


def loader(rank: int, ranks: int, steps: int) -> torch.utils.data.DataLoader[Any]:
    """Loads a rank's part of each step's batch."""
    batches: Any = [batch(SIZE, step, 0)[rank::ranks] for step in range(WARM + steps)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def with_trainer(strategy: str, steps: int) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1}
    pl.Trainer(strategy=strategy, devices=DEVICES, **quiet).fit(Timed(steps))


def main() -> None:
    way, contender, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    strategy = {"spmd": "xla_fsdp_spmd", "classic": "xla_fsdp"}[way]
    if contender == "trainer":
        with_trainer(strategy, steps)
    elif contender == "fabric":
        print(json.dumps(with_fabric(strategy, steps)))
    else:
        print(json.dumps({"spmd": spmd_by_hand, "classic": classic_by_hand}[way](steps)))


if __name__ == "__main__":
    main()
