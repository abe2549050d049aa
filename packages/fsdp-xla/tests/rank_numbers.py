"""What test_rank_numbers.py runs on XLA's CPU devices: values that ranks log, reduce, send and bring back."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_core.errors import CheckpointValueError
from fsdp_core.testing import oracle
from fsdp_core.testing.training import Lit
from xla_process import save_cases

DEVICES, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (1, Path())
STEPS = 3


class Module(Lit):
    """The suite's module with its data, shared out between ranks."""

    def _loader(self, steps: int) -> DataLoader[Any]:
        data: Any = oracle.dataset(oracle.BATCH * steps)
        sampler: Any = DistributedSampler(data, DEVICES, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=oracle.BATCH // DEVICES, sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(STEPS)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)

    test_dataloader = val_dataloader


def trainer(**kwargs: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": str(FOLDER),
    }
    return L.Trainer(strategy="xla_fsdp", devices=DEVICES, **{**quiet, **kwargs})


def logged() -> Any:
    """With ``logger=True``, as it is by default: a fit, and a test of its checkpoint."""
    saves = ModelCheckpoint(monitor="loss", save_top_k=2, every_n_train_steps=1)
    stage = trainer(logger=True, enable_checkpointing=True, callbacks=[saves], log_every_n_steps=1)
    module = Module()
    stage.fit(module)
    told = {
        "global_step": stage.global_step,
        "current_epoch": stage.current_epoch,
        "logged": {name: value.item() for name, value in stage.logged_metrics.items()},
        "best": {Path(path).name: value.item() for path, value in saves.best_k_models.items()},
        "folder": stage.log_dir,
    }
    stage.test(module, ckpt_path="best", verbose=False)
    with open(f"{stage.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        **told,
        "folders": [str(folder) for folder in (FOLDER / "lightning_logs").iterdir()],
        "losses": [float(row["loss"]) for row in rows if row["loss"]],
        "test": [[int(row["step"]), float(row["test_loss"])] for row in rows if row["test_loss"]],
    }


def fabric_job(job: Any) -> Any:
    return L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(job)


def reduced_loss() -> Any:
    """Gradients of a loss whose mean over ranks was asked for before the backward pass, without ``detach()``."""

    def job(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = oracle.new_net()
        net = fabric.setup_module(net)
        x = torch.full((2, oracle.FEATURES), 1.0 + fabric.global_rank).to(fabric.device)
        norms = []
        for reduces in (False, True):
            loss = net(x).square().mean()
            mean = fabric.all_reduce(loss) if reduces else loss
            told = mean.item()
            fabric.backward(loss)
            norms.append(sum(p.grad.abs().sum().item() for p in net.parameters() if p.grad is not None))
            net.zero_grad()
        return {"norms": norms, "means": fabric.all_gather(torch.tensor(told)).tolist()}

    return fabric_job(job)


def broadcast() -> Any:
    """A tensor of the device, alone and in a dict, which waits for a collective of all ranks."""

    def job(fabric: L.Fabric) -> Any:
        net = nn.Linear(2, 2, bias=False)
        nn.init.ones_(net.weight)
        mine = fabric.setup_module(net)(torch.full((1, 2), 1.0 + fabric.global_rank).to(fabric.device)).detach()
        sent = [fabric.broadcast(mine, src=1), fabric.broadcast({"x": [mine]})["x"][0]]
        alone = fabric.broadcast(mine if fabric.global_rank == 0 else None)
        on = [str(one.device) == str(fabric.device) for one in (*sent, alone)]
        add = [(one + mine).sum().item() for one in sent]  # which XLA refuses for tensors of two devices
        values = [[one.tolist() for one in (*sent, alone)], on, add]
        return fabric.strategy.runtime.gather_objects(values)

    return fabric_job(job)


class Measured(Module):
    """Logs metrics of torchmetrics: of one state, of a state for each class, and of a list of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.more = torchmetrics.MetricCollection(
            [torchmetrics.ConfusionMatrix(task="multiclass", num_classes=oracle.FEATURES)]
        )
        self.all = torchmetrics.CatMetric()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        rows = x.sum(1)
        self.mean.update(rows)
        self.all.update(rows)
        self.more.update(x.argmax(1), y.argmax(1))
        self.log("mean", self.mean)
        self.log("own", rows.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append([self.more.compute()["MulticlassConfusionMatrix"].tolist(), self.all.compute().sum().item()])
        self.more.reset()
        self.all.reset()

    def on_train_end(self) -> None:
        self.trainer.callback_metrics["mine"] = torch.tensor(7.0)
        told = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        SEEN.setdefault("measured", []).append({"seen": self.seen, "metrics": told})


#: What ranks have seen: they are threads, and their modules copies.
SEEN: dict[str, list[Any]] = {}


def measured() -> Any:
    stage = trainer(max_epochs=2, limit_val_batches=1.0)
    stage.fit(Measured())
    told = {name: value.item() for name, value in stage.callback_metrics.items()}
    return {"ranks": SEEN["measured"], "told": told}


def masks() -> Any:
    """What dropout keeps on each rank after ``fabric.seed_everything`` there."""

    def job(fabric: L.Fabric, seeds: tuple[int, ...]) -> Any:
        seed = seeds[fabric.global_rank]
        torch.manual_seed(seed) if seed < 0 else fabric.seed_everything(seed, verbose=False)
        kept = nn.Dropout(0.5)(torch.ones(64, device=fabric.device))
        return fabric.all_gather(kept).tolist()

    asked = {"0, 1": (0, 1), "again": (0, 1), "other way round": (1, 0), "far": (-1, 2**32 - 1)}
    fabric = L.Fabric(strategy="xla_fsdp", devices=DEVICES)
    return {name: fabric.launch(job, seeds) for name, seeds in asked.items()}


def saved_from_the_device() -> Any:
    """Tensors of the device beside the model, and a parameter's shard, which is refused."""

    def job(fabric: L.Fabric) -> Any:
        net = oracle.new_net()
        model, optimizer = fabric.setup(net, oracle.momentum(net))
        for x, y in oracle.global_batches(1):
            fabric.backward(mse_loss(model(x.to(fabric.device)), y.to(fabric.device)))
            optimizer.step()
        scale, step = torch.tensor([2.0, 3.0]).to(fabric.device), torch.tensor(3).to(fabric.device)
        whole = {"model": model, "optimizer": optimizer}
        fabric.save(FOLDER / "scaled", {**whole, "scale": scale, "more": [step]})
        rest = fabric.load(FOLDER / "scaled", whole)
        refused = []
        parameter = next(model.parameters())
        held = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
        for shard in (parameter, parameter.detach(), held):
            try:
                fabric.save(FOLDER / "refused", {**whole, "shard": shard})
            except CheckpointValueError as error:
                refused.append(str(error))
        return {"scale": rest["scale"].tolist(), "more": rest["more"][0].item(), "refused": refused}

    return fabric_job(job)


def synced() -> None:
    trainer(sync_batchnorm=True)


def synced_norm() -> None:
    fabric_job(lambda fabric: fabric.setup_module(nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2))))


CASES: dict[str, Any] = {
    "logged": logged,
    "reduced loss": reduced_loss,
    "broadcast": broadcast,
    "measured": measured,
    "masks": masks,
    "saved from the device": saved_from_the_device,
    "sync_batchnorm": synced,
    "SyncBatchNorm": synced_norm,
}

if __name__ == "__main__":
    save_cases({name: case for name, case in CASES.items() if name in sys.argv[3:] or not sys.argv[3:]}, FOLDER)
