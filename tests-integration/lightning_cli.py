"""A user's script: LightningCLI over a small model, as its documentation has it."""

from __future__ import annotations

import json

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader


class Line(LightningModule):
    """Fits a line."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
        self.width = width

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.eye(16, self.width), batch_size=1)  # type: ignore[arg-type]

    test_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Command(LightningCLI):
    """Saves what it has trained, and tells how far it has come."""

    def after_fit(self) -> None:
        if self.config.fit.ckpt_path is None:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/last")


if __name__ == "__main__":
    quiet = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    command = Command(Line, save_config_callback=None, trainer_defaults=quiet)
    if command.trainer.is_global_zero:
        metrics = {name: value.item() for name, value in command.trainer.callback_metrics.items()}
        print(json.dumps({"step": command.trainer.global_step, **metrics}))
