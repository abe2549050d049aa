"""A user's script: of what is not Python's own, it imports Lightning alone, and it says ``strategy="NAME"``."""

from __future__ import annotations

import argparse
import json
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
STEPS = 3


class Model(BoringModel):
    """One linear layer; may fail on one rank, in its second step."""

    def __init__(self, fails_on: int = -1) -> None:
        super().__init__()
        self.fails_on = fails_on

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            say(reached="step 1")
            if self.trainer.global_rank == self.fails_on:
                raise RuntimeError(f"rank {self.fails_on} fails")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch), sync_dist=True)

    def train_dataloader(self) -> Any:
        L.seed_everything(2, verbose=False)
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        L.seed_everything(3, verbose=False)
        return super().val_dataloader()


def say(**what: Any) -> None:
    """Write a line of JSON."""
    print("\n" + json.dumps(what), flush=True)


def held_by(optimizer: Any) -> int:
    """How many of the model's numbers this rank's optimizer holds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)


def report(front_end: str, strategy: Any, optimizer: Any, val_loss: float) -> None:
    """Write what the test compares."""
    say(
        front_end=front_end,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        strategy=f"{type(strategy).__module__}.{type(strategy).__qualname__}",
        held=held_by(optimizer),
        val_loss=val_loss,
    )


def under_trainer(args: argparse.Namespace) -> None:
    """Fit, fit again, validate."""
    L.seed_everything(1, verbose=False)
    model = Model(args.fails_on)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=-1 if args.forever else 1,
        limit_train_batches=STEPS,
        limit_val_batches=0 if args.forever else 2,
        **QUIET,
    )
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    (metrics,) = trainer.validate(model, verbose=False)
    report("trainer", trainer.strategy, trainer.optimizers[0], metrics["val_loss"])


def under_fabric(args: argparse.Namespace) -> None:
    """Two passes over the data, and the loss on other data."""
    L.seed_everything(1, verbose=False)
    fabric = L.Fabric(strategy=args.strategy, accelerator="cpu", devices=args.devices)
    fabric.launch()
    module = Model(args.fails_on)
    (optimizer,), _ = module.configure_optimizers()
    model, optimizer = fabric.setup(module, optimizer)
    data: Any = fabric.setup_dataloaders(module.train_dataloader())
    for _ in range(2):
        for i, batch in zip(range(STEPS), data, strict=False):
            optimizer.zero_grad()
            fabric.backward(model.training_step(batch, i)["loss"])
            optimizer.step()
    data = fabric.setup_dataloaders(module.val_dataloader())
    losses: list[Any] = [module.loss(model(batch)) for _, batch in zip(range(2), data, strict=False)]
    mean: Any = fabric.all_reduce(sum(losses) / 2)
    report("fabric", fabric.strategy, optimizer, mean.item())


def main(arguments: list[str] | None = None) -> None:
    """Train under the front ends that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("front_ends", nargs="+", choices=["trainer", "fabric"])
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--fails-on", type=int, default=-1)
    parser.add_argument("--forever", action="store_true")
    args = parser.parse_args(arguments)
    for front_end in args.front_ends:
        {"trainer": under_trainer, "fabric": under_fabric}[front_end](args)


if __name__ == "__main__":
    main()
