"""What test_everywhere.py runs: on XLA's CPU devices, and on a TPU's chips, whose ranks are processes."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_core import load_state_dict
from fsdp_core.testing import oracle
from fsdp_core.testing.training import QUIET
from xla_process import save_cases

FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()
#: Rows of a batch: a multiple of any number of chips that a host has.
ROWS, STEPS = 48, 4


def rows() -> Any:
    return oracle.dataset(ROWS * STEPS)


def train_plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of one process."""
    net = oracle.new_net()
    optimizer, losses = oracle.momentum(net), []
    for x, y in DataLoader(rows(), batch_size=ROWS):
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, net.state_dict()


def in_fabric(name: str, options: dict[str, Any]) -> Any:
    import fsdp_core

    path = FOLDER / name

    def train(fabric: Any) -> list[float]:
        with fabric.init_module():
            net = oracle.new_net()
        model, optimizer = fabric.setup(net, oracle.momentum(net))
        loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=ROWS // fabric.world_size))
        losses = []
        for x, y in loader:
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()))
        fabric.save(path, {"model": model, "optimizer": optimizer})
        other = fabric.setup_module(oracle.new_net())
        fabric.load(path, {"model": other}, strict=False)
        assert fabric.all_reduce(mse_loss(model(x), other(x)).detach()).item() == 0.0
        return [float(loss) for loss in losses]

    strategy: Any = fsdp_core.resolve(name.split()[0], "fabric")(**options)
    fabric = L.Fabric(strategy=strategy, accelerator=accelerator(), devices=devices())
    if "spmd" in name:
        fabric.launch()
        losses = train(fabric)
    else:
        losses = fabric.launch(train)
    return {"losses": losses, "weights": load_state_dict(path)}


class Module(L.LightningModule):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.net, self.path = oracle.new_net(), str(path)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return oracle.momentum(self)

    def train_dataloader(self) -> Any:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(rows(), ranks, rank, shuffle=False)  # the batches of train_plain()
        return DataLoader(rows(), batch_size=ROWS // ranks, sampler=sampler)

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def in_trainer(name: str) -> Any:
    path = FOLDER / f"{name} trainer"
    trainer = L.Trainer(
        strategy=name,
        accelerator=accelerator(),
        devices=devices(),
        max_epochs=1,
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(Module(path))
    weights = {key.removeprefix("net."): value for key, value in load_state_dict(path).items()}
    return {"losses": trainer.callback_metrics["loss"].item(), "weights": weights}


def accelerator() -> str:
    return "auto" if os.environ["PJRT_DEVICE"] == "CPU" else "tpu"


def devices() -> Any:
    return int(sys.argv[1]) if os.environ["PJRT_DEVICE"] == "CPU" else "auto"


CASES: dict[str, dict[str, Any]] = {
    "ranks": {
        "fabric": lambda: in_fabric("xla_fsdp", {}),
        "fabric in turn": lambda: in_fabric("xla_fsdp in turn", {"sequential_save": True}),
        "trainer": lambda: in_trainer("xla_fsdp"),
    },
    "spmd": {"fabric": lambda: in_fabric("xla_fsdp_spmd", {}), "trainer": lambda: in_trainer("xla_fsdp_spmd")},
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    save_cases(CASES[sys.argv[3]], FOLDER)
