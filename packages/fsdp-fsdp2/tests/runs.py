"""What the tests run on each rank: the same models under Trainer and Fabric."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_fsdp2.fabric
import oracle
from fsdp_fsdp2 import FSDP2Strategy
from oracle import BATCH, dataset, new_net


class Lit(pl.LightningModule):
    """The test net under the Trainer; keeps the losses that it saw."""

    def __init__(self, optimizer: str = "sgd", **net: Any) -> None:
        super().__init__()
        self.net = new_net(**net)
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []
        self.validation_losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.validation_losses.append(loss)
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return getattr(oracle, self.optimizer_name)(self)


def loader(steps: int, world_size: int) -> DataLoader[Any]:
    """Loads batches that together, over the ranks, are the oracle's, in its order."""
    data = dataset(BATCH * steps)
    sampler = DistributedSampler(data, world_size, int(os.environ.get("RANK", 0)), shuffle=False)
    return DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)


def trainer(tmp: Any, strategy: Any = "fsdp2", world_size: int = 1, **kwargs: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "default_root_dir": str(tmp),
    }
    return pl.Trainer(strategy=strategy, **{**quiet, **kwargs})


def full_state(strategy: Any, module: nn.Module) -> dict[str, Tensor]:
    """The whole state by name, on every rank."""
    state = strategy.backend.model_state(module)
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for name, v in state.items()}


def means(losses: list[Tensor]) -> list[float]:
    """Each step's loss over all ranks."""
    if not losses:
        return []
    stacked = torch.stack(losses)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(stacked)
        stacked /= torch.distributed.get_world_size()
    return stacked.tolist()


def fit(
    tmp: str,
    world_size: int,
    steps: int,
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Fit under the Trainer; return the losses and the final state."""
    strategy: Any = "fsdp2" if options is None else FSDP2Strategy(**options)
    module = Lit(optimizer, **(net or {}))
    run = trainer(tmp, strategy, world_size, **kwargs)
    run.fit(module, loader(steps, world_size))
    state = full_state(run.strategy, module)
    return means(module.losses), {name.removeprefix("net."): v for name, v in state.items()}


def fabric_fit(
    world_size: int,
    steps: int,
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    precision: Any = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train under Fabric with one joint setup; return the losses and the final state."""
    strategy: Any = "fsdp2" if options is None else fsdp_fsdp2.fabric.FSDP2Strategy(**options)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()
    net = new_net()
    model, opt = fabric.setup(net, getattr(oracle, optimizer)(net))
    data = fabric.setup_dataloaders(loader(steps, world_size))
    losses = []
    for i, (x, y) in enumerate(data):
        stepping = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not stepping):
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss / accumulate)
        if stepping:
            if clip_norm is not None:
                fabric.clip_gradients(model, opt, max_norm=clip_norm)
            if clip_value is not None:
                fabric.clip_gradients(model, opt, clip_val=clip_value)
            opt.step()
            opt.zero_grad()
    return means(losses), full_state(fabric.strategy, net)
