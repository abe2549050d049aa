"""A user's script, which imports Lightning alone: trains with a strategy's name, or opens what that has saved.

``one_device.py train STRATEGY DEVICES FOLDER EPOCHS [CKPT_PATH]`` and ``one_device.py open RUN``, where ``RUN`` is what
the training has told. Both write a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS = 12, 3
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(L.LightningModule):
    """Uneven sizes, a tied pair, a buffer, two param groups, a scheduler, hyper-parameters, and state of its own."""

    def __init__(self, width: int = 7, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.inp = nn.Linear(6, 6, bias=False)
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.inp.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.losses: list[float] = []
        self.note: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.out(self.body(self.inp(x) * self.scale))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        # not in the order of the module, so that a number that is given by that order is seen
        groups = [
            {"params": [p for p in reversed(list(self.parameters())) if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"epoch": self.current_epoch, "seen": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]["epoch"], checkpoint["note"]["seen"].tolist()


class Data(L.LightningDataModule):
    """The same batches for any number of ranks, and a state of its own."""

    def __init__(self, devices: int = 1, name: str = "default") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaded: Any = None

    def _loader(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        x, y = (torch.randn(BATCH * STEPS, 6, generator=generator) for _ in range(2))
        data, devices = TensorDataset(x, y), self.hparams["devices"]
        rank = 0 if self.trainer is None else self.trainer.global_rank
        sampler: Any = DistributedSampler(data, devices, rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH // devices, sampler=sampler)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.hparams["name"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["name"]


def train(strategy: str, devices: int, folder: str, epochs: int, ckpt_path: str | None = None) -> dict[str, Any]:
    """Fit with a ModelCheckpoint; every rank must call it."""
    keep = ModelCheckpoint(
        dirpath=f"{folder}/kept", monitor="val_loss", filename="{epoch}", save_top_k=2, save_last=True
    )
    model, data = Model(), Data(devices, "trained")
    trainer = L.Trainer(
        strategy=strategy, devices=devices, max_epochs=epochs, callbacks=[keep], default_root_dir=folder, **QUIET
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    assert keep.best_model_score is not None
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)
    return {
        "losses": model.losses,
        "best": keep.best_model_path,
        "last": keep.last_model_path,
        "score": float(keep.best_model_score),
        "test_loss": metrics["test_loss"],
        "note": model.note,
        "data": data.loaded,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
        "rank": trainer.global_rank,
    }


def plain_trainer(**kwargs: Any) -> L.Trainer:
    """A Trainer as everyone has it: one device, and no strategy."""
    return L.Trainer(devices=1, **{"enable_checkpointing": False, **QUIET, **kwargs})


def weights(model: nn.Module) -> dict[str, Any]:
    """A module's state as plain numbers."""
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def open_everywhere(run: dict[str, Any]) -> dict[str, Any]:
    """Open the folder of a run in the ways in which users open a file."""
    last, best = run["last"], run["best"]
    told: dict[str, Any] = {}

    loaded = Model.load_from_checkpoint(last)
    told["load_from_checkpoint"] = weights(loaded)
    told["hyper-parameters"] = dict(loaded.hparams), loaded.note
    told["best"] = weights(Model.load_from_checkpoint(best, map_location="cpu", weights_only=True))
    told["override"] = dict(Model.load_from_checkpoint(last, lr=0.5).hparams)
    told["not strict"] = len(list(Larger.load_from_checkpoint(last, strict=False).parameters()))
    told["weights only"] = weights(Model.load_from_checkpoint(Path(last).parent.parent / "weights"))
    data = Data.load_from_checkpoint(last)
    told["data module"] = data.loaded, dict(data.hparams)

    for stage in ("validate", "test"):
        told[stage] = getattr(plain_trainer(), stage)(Model(), datamodule=Data(), ckpt_path=last, verbose=False)[0]
    predicted: Any = plain_trainer().predict(Model(), datamodule=Data(), ckpt_path=last)
    with torch.no_grad():
        told["predict"] = [torch.equal(got, loaded(x)) for got, (x, _) in zip(predicted, Data()._loader(), strict=True)]

    fabric = L.Fabric(accelerator="cpu", devices=1)
    model = Model()
    rest = fabric.load(last, {"state_dict": model})
    told["fabric"] = weights(model), sorted(rest)
    told["backends"] = [name for name in sys.modules if name in ("fsdp_fsdp2.backend", "fsdp_cuda_native.backend")]
    return told


class Larger(Model):
    """A layer more than was saved."""

    def __init__(self, width: int = 7, lr: float = 0.01) -> None:
        super().__init__(width, lr)
        self.more = nn.Linear(2, 2)


def main(what: str, *arguments: str) -> None:
    """Train or open, and tell."""
    if what == "train":
        strategy, devices, folder, epochs, *path = arguments
        told = train(strategy, int(devices), folder, int(epochs), *path)
    else:
        told = open_everywhere(json.loads(arguments[0]))
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
