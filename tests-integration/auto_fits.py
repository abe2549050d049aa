"""Fits by ``strategy="fsdp_auto"`` with memory for shards alone, and with more; and by the name of a strategy."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsdp_core.rehearsal.auto_strategy import AutoStrategy

WIDTH = 128


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def new_loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2)), batch_size=2)  # type: ignore[arg-type]


def new_trainer(strategy: str | AutoStrategy, devices: int, epochs: int = 1) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


#: What AdamW in fp32 needs on two ranks, by the bytes of the parameters. With shards: halves of parameters, gradients
#: and two states, and a unit's parameters and gradients. Without: all of these, and buckets of gradients to be sent.
SHARDED, WHOLE = 4, 5
NUMEL = 8 * (WIDTH + 1) * WIDTH
MEMORY_FOR_SHARDS = int(4 * NUMEL * (SHARDED + WHOLE) / 2 * 1.1)


def main() -> None:
    torch.set_num_threads(1)
    for strategy in (AutoStrategy(memory=MEMORY_FOR_SHARDS), AutoStrategy(memory=2**30), "fsdp2"):
        net, trainer = Net(), new_trainer(strategy, devices=2)
        trainer.fit(net, new_loader())
        print(json.dumps([trainer.global_rank, type(trainer.strategy).__name__, net.losses]))
        if not isinstance(strategy, str) and strategy.memory == MEMORY_FOR_SHARDS:
            trainer.save_checkpoint("auto.ckpt", weights_only=False)


if __name__ == "__main__":
    main()
