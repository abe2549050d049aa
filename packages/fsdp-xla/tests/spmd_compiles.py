"""Counts XLA's compilations in fits with everything on: progress bar, logger, accumulation, validation, checkpoints."""

from __future__ import annotations

import csv
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fsdp_core.testing.oracle import dataset, new_net
from spmd_runs import compiled

STEPS = 8


class Everything(pl.LightningModule):
    """Logs by step and by epoch, tensors and numbers, under a schedule of every step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net, self.kind = new_net(blocks=1, dropout=0.1), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("index", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), prog_bar=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        if self.kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Count(pl.Callback):
    """How many programs were compiled by the end of each batch, and of each epoch with its validation."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.epochs: list[int] = []
        self.began = compiled()

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches.append(compiled() - self.began)

    def on_train_epoch_start(self, *args: Any) -> None:
        self.epochs.append(compiled() - self.began)

    def on_fit_end(self, *args: Any) -> None:
        self.epochs.append(compiled() - self.began)


def fit(tmp: str, optimizer: str = "adamw", **kwargs: Any) -> dict[str, Any]:
    count = Count()
    best = ModelCheckpoint(tmp, monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}-{val_loss:.3f}")
    trainer = pl.Trainer(
        strategy="xla_fsdp_spmd",
        devices=4,
        max_epochs=4,
        logger=CSVLogger(tmp, flush_logs_every_n_steps=2),
        log_every_n_steps=2,
        num_sanity_val_steps=1,
        callbacks=[count, best, LearningRateMonitor("step")],
        default_root_dir=tmp,
        enable_model_summary=False,
        **kwargs,
    )
    data: Any = dataset(4 * STEPS)
    loader = DataLoader(data, batch_size=4)
    trainer.fit(Everything(optimizer), loader, DataLoader(data[:8], batch_size=4))
    logged: dict[str, Any] = {"epoch_number": [], "val_loss": [], "best": float(best.best_model_score or 0)}
    with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name in ("epoch_number", "val_loss"):
                logged[name] += [float(row[name])] if row.get(name) else []
    return {"batches": count.batches, "epochs": count.epochs, "last": compiled() - count.began, "logged": logged}


def main(out: str, tmp: str) -> None:
    results = {
        "plain": fit(f"{tmp}/plain", gradient_clip_val=0.5),
        "accumulating": fit(f"{tmp}/accumulating", accumulate_grad_batches=2),
        "often": fit(f"{tmp}/often", "momentum", val_check_interval=0.5),
    }
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
