"""xla_fsdp_spmd compiles what a run repeats once, and then nothing more, whatever is logged, shown and saved."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fsdp_core.testing.oracle import dataset, new_net
from launching import LaunchingSPMD
from spmd_runs import compiled

BATCHES, EPOCHS = 8, 3


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


def fit(tmp: Path, optimizer: str = "adamw", **kwargs: Any) -> dict[str, Any]:
    """With everything on: progress bar, logger, accumulation, validation, checkpoints."""
    count = Count()
    best = ModelCheckpoint(tmp, monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}-{val_loss:.3f}")
    trainer = pl.Trainer(
        strategy="xla_fsdp_spmd",
        devices=4,
        max_epochs=EPOCHS,
        logger=CSVLogger(tmp, flush_logs_every_n_steps=2),
        log_every_n_steps=2,
        num_sanity_val_steps=1,
        callbacks=[count, best, LearningRateMonitor("step")],
        default_root_dir=str(tmp),
        enable_model_summary=False,
        **kwargs,
    )
    data: Any = dataset(4 * BATCHES)
    loader = DataLoader(data, batch_size=4)
    trainer.fit(Everything(optimizer), loader, DataLoader(data[:8], batch_size=4))
    logged: dict[str, Any] = {"epoch_number": [], "val_loss": [], "best": float(best.best_model_score or 0)}
    with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name in ("epoch_number", "val_loss"):
                logged[name] += [float(row[name])] if row.get(name) else []
    return {"batches": count.batches, "epochs": count.epochs, "last": compiled() - count.began, "logged": logged}


def fits(tmp: Path) -> dict[str, Any]:
    return {
        "plain": fit(tmp / "plain", gradient_clip_val=0.5),
        "accumulating": fit(tmp / "accumulating", accumulate_grad_batches=2),
        "often": fit(tmp / "often", "momentum", val_check_interval=0.5),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a process in which nothing has been compiled."""
    with LaunchingSPMD() as ranks:
        found: dict[str, Any] = ranks.call(4, fits, tmp_path_factory.mktemp("spmd_compiles"))
    return found


@pytest.mark.parametrize("case", ["plain", "accumulating", "often"])
def test_nothing_is_compiled_after_the_second_epochs_first_step(results: dict[str, Any], case: str) -> None:
    batches = results[case]["batches"]
    assert len(batches) == BATCHES * EPOCHS
    assert results[case]["last"] == batches[BATCHES], f"programs compiled by the end of each batch: {batches}"


@pytest.mark.parametrize(("case", "cycle"), [("plain", 1), ("accumulating", 2), ("often", 2)])
def test_the_first_epoch_compiles_one_cycle_of_steps(results: dict[str, Any], case: str, cycle: int) -> None:
    """With momentum of SGD they are two: its first step copies gradients, and the others add to what is there."""
    batches = results[case]["batches"]
    # half of an epoch lies before the first validation
    assert batches[BATCHES // 2 - 1] == batches[cycle - 1], f"programs compiled by the end of each batch: {batches}"
    assert results[case]["epochs"][1] == batches[cycle - 1], "after a validation of one batch, one of two"


def test_it_counts(results: dict[str, Any]) -> None:
    assert results["plain"]["batches"][0] > 0


@pytest.mark.parametrize("case", ["plain", "accumulating", "often"])
def test_numbers_are_logged_as_they_are(results: dict[str, Any], case: str) -> None:
    logged = results[case]["logged"]
    assert logged["epoch_number"] == [0.0, 1.0, 2.0]
    assert len(logged["val_loss"]) == EPOCHS * (2 if case == "often" else 1)
    assert logged["best"] == pytest.approx(min(logged["val_loss"]))
