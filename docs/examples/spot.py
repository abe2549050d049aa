"""Trains on machines that may vanish without warning: ``python spot.py s3://my-bucket/run-1``.

Started again with the same words, on the same machine or another, it goes on from the last complete checkpoint.
Needs ``pip install s3fs`` for S3, ``gcsfs`` for Google's buckets, ``adlfs`` for Azure's; a folder will do, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A small network.

    Args:
        pause: Seconds that each step takes besides, so that there is time to kill it.
    """

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.pause = pause

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        time.sleep(self.pause)
        return loss

    def on_train_batch_end(self, *batch: Any) -> None:
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"].item()
            print(json.dumps({"step": self.trainer.global_step, "loss": loss}), flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", help="a folder, or a URL such as s3://my-bucket/run-1")
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=int(os.environ.get("SKYPILOT_NUM_NODES", "1")),
        max_epochs=3,
        # one checkpoint, last.ckpt, which each save replaces at once and as a whole; in minutes: train_time_interval=
        callbacks=[ModelCheckpoint(args.checkpoints, every_n_train_steps=3, save_top_k=0, save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Model(args.pause), data, ckpt_path="last")


if __name__ == "__main__":
    main()
