"""What test_ray.py runs in workers of Ray Train, around the example of the docs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
import ray.train.torch
import torch
from lightning.pytorch.callbacks import Callback
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from torch.nn.functional import mse_loss

import fsdp_core
import ray_train

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Told(Callback):
    """Writes each step's loss, and kills this process in the second epoch of the first attempt."""

    def __init__(self, file: Path, *, dies_after: Path | None) -> None:
        self.file, self.dies_after = file, dies_after

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = trainer.callback_metrics["loss"].item()
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": trainer.global_step, "loss": loss}) + "\n")
        if self.dies_after is not None and trainer.current_epoch == 1 and batch_idx == 1:
            while not self.dies_after.exists():  # what was reported is known to Ray's controller a little later
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def everything(config: dict[str, Any]) -> None:
    """Check the placement and the messages, run Fabric, and train as the example does; die once.

    The first attempt trains an epoch under one strategy and goes on under the other one, under which it dies; the
    second attempt goes on under that one, and after an epoch under the first one again.
    """
    context = ray.train.get_context()
    rank, resumes = context.get_world_rank(), ray.train.get_checkpoint() is not None
    folder = Path(config["folder"]) / f"attempt-{int(resumes)}"
    folder.mkdir(exist_ok=True)
    if not resumes:
        told = {
            "rays": {
                "rank": rank,
                "world_size": context.get_world_size(),
                "local_rank": context.get_local_rank(),
                "node_rank": context.get_node_rank(),
                "device": str(ray.train.torch.get_device()),
                "nodes": 2,
            },
            **{
                strategy: {
                    **under_fabric(strategy),
                    "errors": {name: error_of(wrong) for name, wrong in wrongs(strategy).items()},
                }
                for strategy in config["strategies"]
            },
        }
        (folder / f"told-{rank}.json").write_text(json.dumps(told))
    known = Path(config["folder"]) / "storage" / "run" / "checkpoint_manager_snapshot.json"
    dies_after = known if not resumes and rank == 1 else None
    first, second = config["strategies"]
    for strategy, epochs in ((second, 2), (first, 3)) if resumes else ((first, 1), (second, 2)):
        told_of = Told(folder / f"losses-{rank}.jsonl", dies_after=dies_after)
        ray_train.train({"strategy": strategy, "epochs": epochs, "callbacks": [told_of]})


def under_fabric(strategy: str) -> dict[str, Any]:
    """Train under Fabric; what it knows of its place, and the losses."""
    torch.manual_seed(0)
    fabric = L.Fabric(
        strategy=strategy, accelerator="auto", devices="auto", plugins=[RayLightningEnvironment()], num_nodes=2
    )
    fabric.launch()
    module = ray_train.Model()
    model, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(ray_train.data(batch_size=8))
    loader.sampler.seed = 0
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    environment = fabric.strategy.cluster_environment
    return {
        "ours": {
            "rank": fabric.global_rank,
            "world_size": fabric.world_size,
            "local_rank": environment.local_rank(),
            "node_rank": fabric.node_rank,
            "device": str(fabric.device),
            "nodes": fabric.strategy.num_nodes,
        },
        "fabric": losses,
    }


def wrongs(strategy: str) -> dict[str, Callable[[], Any]]:
    """What contradicts Ray."""
    ours: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu"}
    rays = [RayLightningEnvironment()]
    return {
        "devices": lambda: L.Trainer(devices=3, plugins=rays, **ours, **QUIET),
        "environment": lambda: L.Trainer(devices="auto", **ours, **QUIET),
        "num_nodes": lambda: L.Fabric(devices="auto", num_nodes=3, plugins=rays, **ours).launch(),
        "in the background": lambda: reports_in_the_background(strategy, rays),
    }


def reports_in_the_background(strategy: str, plugins: list[Any]) -> None:
    """Fit with saves in the background, which Ray's callback would upload before they are complete."""
    made = fsdp_core.resolve(strategy, "trainer")(async_save=True)
    ours: dict[str, Any] = {"strategy": made, "accelerator": "cpu", "devices": "auto"}
    trainer = L.Trainer(plugins=plugins, callbacks=[RayTrainReportCallback()], max_epochs=1, **ours, **QUIET)
    trainer.fit(ray_train.Model(), ray_train.data(batch_size=8))


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
