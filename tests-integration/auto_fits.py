"""Fits by ``strategy="fsdp_auto"``, by the name of what that has chosen, and by ``"fsdp_auto"`` again."""

from __future__ import annotations

import gc
import json
import sys

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsdp_core.errors import ShardingError
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


def new_trainer(strategy: str | AutoStrategy, devices: int, epochs: int = 1, accelerator: str = "cpu") -> pl.Trainer:
    return pl.Trainer(
        accelerator=accelerator,
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
    for strategy in ("fsdp_auto", "fsdp2", "fsdp_auto"):
        net, trainer = Net(), new_trainer(strategy, devices=2, accelerator="auto")
        try:
            trainer.fit(net, new_loader())
        except ShardingError as error:
            say(rank=trainer.global_rank, refused=str(error))
            break
        say(rank=trainer.global_rank, strategy=type(trainer.strategy).__name__, losses=net.losses)
        if strategy == "fsdp_auto":
            trainer.save_checkpoint("auto.ckpt", weights_only=False)
        del net, trainer
        gc.collect()  # the device has no memory for two


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")  # at once: ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main()
