"""Trains under Ray Train: ``python ray_train.py --workers 2``.

Ray starts the ranks, restarts them when a worker or its node is lost, and hands them the last checkpoint that they
reported. Needs ``pip install "ray[train]"``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batch_size: int) -> DataLoader[Any]:
    """Inputs and targets, the same on every worker; the Trainer gives each worker its own part."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=True)


def train(config: dict[str, Any]) -> None:
    """What each worker does; after a failure, from the last checkpoint that was reported."""
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=config["strategy"],
        accelerator="auto",  # what Ray gives: ScalingConfig(use_gpu=True) for GPUs
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), *config.get("callbacks", ())],
        max_epochs=config["epochs"],
        enable_checkpointing=False,  # the callback saves and reports, after each epoch
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    reported = ray.train.get_checkpoint()
    if reported is None:
        trainer.fit(Model(), data(batch_size=8))
        return
    with reported.as_directory() as folder:
        path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.fit(Model(), data(batch_size=8), ckpt_path=path)


def main() -> None:
    """Start the workers, and show the last metrics."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", help="a folder or URL that all nodes share; ~/ray_results if left out")
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"strategy": args.strategy, "epochs": 3},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(
            name="example",
            storage_path=args.storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
