"""The same script on one machine and on many, under any launcher: trains, saves, and goes on where it was ended.

torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 many_machines.py fsdp2
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fsdp_core.checkpoint import is_checkpoint
from fsdp_core.lightning import GlobalBatch, micro_batches

PER_RANK = 2  # rows that a rank computes on at a time
GLOBAL_BATCH = 8  # rows of an optimizer step, on any number of ranks that it can be divided over


def devices_and_hosts() -> tuple[int | str, int]:
    """How many ranks there are on a host, and how many hosts, as torchrun or SLURM says."""
    given = os.environ
    devices = given.get("LOCAL_WORLD_SIZE") or given.get("SLURM_NTASKS_PER_NODE")
    hosts = given.get("GROUP_WORLD_SIZE") or given.get("SLURM_NNODES") or "1"
    return int(devices) if devices else "auto", int(hosts)


def rows() -> StatefulDataLoader[Any]:
    """Rows of a table, each with its number. A loader of torchdata's can go on within an epoch under Fabric too."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(TensorDataset(torch.arange(len(x)), x, x.sum(1, keepdim=True)), PER_RANK, shuffle=True)


class Net(L.LightningModule):
    """Learns to sum a row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Any:
        """Of the shape (rows, 8); returns the shape (rows, 1)."""
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        numbers, x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        say("trainer", self.global_step, numbers, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, over what may be shards."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def say(front_end: str, step: int, numbers: Tensor, loss: Tensor) -> None:
    """Write down which rows a rank has seen, in one piece: ranks share the output."""
    told = {"front_end": front_end, "step": step, "rows": numbers.tolist(), "loss": loss.item()}
    print(json.dumps(told) + "\n", end="", flush=True)


def under_trainer(strategy: Any, folder: str, steps: int) -> None:
    """Fit, from the last checkpoint in the folder if there is one."""
    devices, hosts = devices_and_hosts()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=devices,
        num_nodes=hosts,
        max_steps=steps,
        callbacks=[
            ModelCheckpoint(f"{folder}/trainer", every_n_train_steps=2, save_last=True, save_on_exception=True),
            GlobalBatch(GLOBAL_BATCH, per_rank=PER_RANK),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), rows(), ckpt_path="last")


def under_fabric(strategy: Any, folder: str, steps: int) -> None:
    """The same with a loop of one's own."""
    devices, hosts = devices_and_hosts()
    fabric = L.Fabric(strategy=strategy, accelerator="auto", devices=devices, num_nodes=hosts)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    data = fabric.setup_dataloaders(rows())
    state = {"model": model, "optimizer": optimizer, "data": data, "step": 0}
    path = f"{folder}/fabric.ckpt"
    if is_checkpoint(path):
        fabric.load(path, state)
    accumulate = micro_batches(GLOBAL_BATCH, per_rank=PER_RANK, ranks=fabric.world_size)
    seen = 0
    while state["step"] < steps:
        for numbers, x, y in data:
            seen += 1
            with fabric.no_backward_sync(model, enabled=seen % accumulate != 0):
                loss = nn.functional.mse_loss(model(x), y)
                say("fabric", state["step"], numbers, loss)
                fabric.backward(loss / accumulate)
            if seen % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                if state["step"] % 2 == 0:
                    fabric.save(path, state)
                if state["step"] == steps:
                    break


def main() -> None:
    """Train under the named strategies, each under the front ends that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="+", help="names, such as fsdp2")
    parser.add_argument("--front-ends", nargs="+", default=["trainer"], choices=["trainer", "fabric"])
    parser.add_argument("--folder", default="runs", help="a path that all hosts see, or a bucket, for checkpoints")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for strategy in given.strategies:
        for front_end in given.front_ends:
            run = under_trainer if front_end == "trainer" else under_fabric
            run(strategy, f"{given.folder}/{strategy}", given.steps)


if __name__ == "__main__":
    main()
