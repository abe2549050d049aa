"""Counts what XLA does in a run by hand, under Fabric or under Trainer: programs compiled, and each step's work.

Called with the number of devices, a folder, "classic" or "spmd", and "by hand", "fabric" or "trainer".
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from fsdp_xla.ranks.launch import run_ranks
from xla_process import save_cases

STEPS, WARM = 12, 4
RUN = sys.argv[1:] if __name__ == "__main__" else ["1", "", "classic", "by hand"]
DEVICES, FOLDER, WAY, CONTENDER = int(RUN[0]), Path(RUN[1]), RUN[2], RUN[3]
STRATEGY = {"classic": "xla_fsdp", "spmd": "xla_fsdp_spmd"}[WAY]
building = threading.Lock()
#: What is counted is of all ranks: none may fetch its loss before all have looked.
counted = threading.Barrier(DEVICES if WAY == "classic" else 1)


class Net(nn.Module):
    """Two units and the root, which computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) ** 2).mean()


def batch(rank: int, ranks: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(2))[rank::ranks]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


class Counts:
    """What XLA has done in the steps after the warm ones, and in all."""

    def before(self, step: int) -> None:
        if step == WARM:
            self.began = self._now()

    def told(self, loss: Tensor) -> dict[str, Any]:
        done = {name: value - self.began[name] for name, value in self._now().items()}
        counted.wait(60)
        return {"steps": done, "programs": metrics.counter_value("UncachedCompile"), "loss": float(loss)}

    def _now(self) -> dict[str, int]:
        xm.wait_device_ops()
        of_metrics = {name: metrics.metric_data(name) for name in ("TransferFromDeviceTime",)}
        return {
            "executions": sum(metrics.counter_value(name) or 0 for name in ("ExecuteComputation", "ExecuteReplicated")),
            "compiles": metrics.counter_value("UncachedCompile") or 0,
            **{name: 0 if data is None else data[0] for name, data in of_metrics.items()},
        }


def loop(root: nn.Module, rank: int, ranks: int, place: Any) -> dict[str, Any]:
    counts, optimizer = Counts(), adamw(root)
    for step in range(STEPS):
        counts.before(step)
        loss = root(place(batch(rank, ranks)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    return counts.told(loss)


def spmd_by_hand() -> Any:
    xr.use_spmd()
    mesh = spmd.Mesh(numpy.arange(DEVICES), (DEVICES,), ("fsdp",))

    def cut(tensor: Tensor, mesh: Any) -> None:
        if tensor.ndim:  # not the loss
            spmd.mark_sharding(tensor, mesh, ("fsdp", None))

    def place(rows: Tensor) -> Tensor:
        on_devices = rows.to("xla")
        cut(on_devices, mesh)
        return on_devices

    net = Net()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = SpmdFullyShardedDataParallel(block, mesh=mesh, shard_output=cut)
    return loop(SpmdFullyShardedDataParallel(net, mesh=mesh, shard_output=cut), 0, 1, place)


def classic_by_hand() -> Any:
    def train(_: None) -> dict[str, Any]:
        device = torch_xla.device()
        with building:
            net = Net().to(device)
        options = {"pin_layout_in_collective_ops": False}
        for index, block in enumerate(net.blocks):
            net.blocks[index] = XlaFullyShardedDataParallel(block, **options)
        root = XlaFullyShardedDataParallel(net, **options)
        return loop(root, xr.global_ordinal(), DEVICES, lambda rows: rows.to(device))

    return run_ranks(DEVICES, train, None)


def loader(rank: int, ranks: int) -> Any:
    rows: Any = [batch(rank, ranks)] * STEPS
    return torch.utils.data.DataLoader(rows, batch_size=None)


def with_fabric() -> Any:
    def train(fabric: L.Fabric) -> dict[str, Any]:
        with fabric.init_module():
            net = Net()
        root = fabric.setup_module(net)
        optimizer, counts = fabric.setup_optimizers(adamw(root)), Counts()
        batches = loader(fabric.global_rank, fabric.world_size)
        for step, rows in enumerate(fabric.setup_dataloaders(batches, use_distributed_sampler=False)):
            counts.before(step)
            loss = root(rows)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        return counts.told(loss)

    return L.Fabric(strategy=STRATEGY, devices=DEVICES).launch(train)


told: dict[str, Any] = {}


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.counts = Net(), Counts()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        self.counts.before(index)
        loss: Tensor = self.net(rows)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size)

    def on_train_end(self) -> None:
        counted = self.counts.told(self.loss)
        if self.trainer.is_global_zero:
            told.update(counted)


def with_trainer() -> Any:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1}
    L.Trainer(strategy=STRATEGY, devices=DEVICES, **quiet).fit(Lit())
    return dict(told)


if __name__ == "__main__":
    by_hand = {"spmd": spmd_by_hand, "classic": classic_by_hand}[WAY]
    save_cases({"counts": {"by hand": by_hand, "fabric": with_fabric, "trainer": with_trainer}[CONTENDER]}, FOLDER)
