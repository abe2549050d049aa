"""Trains the suite's net under Fabric with the strategy of a name, on from a folder and into one; see test_xla.py.

Usage: any_strategy.py STRATEGY RANKS FOLDER... --steps FIRST LAST [--load FOLDER...]

Writes, into each FOLDER: ``loaded``, what was loaded, saved again at once; ``trained``, after the steps; and
``losses.json``. If there are several, it goes on from one after the other, each time with a net of its own.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss

from fsdp_core.testing import oracle


def train_each(fabric: Fabric, folders: list[Path], first: int, last: int, loads: list[Path]) -> None:
    for folder, load in zip(folders, loads or [None], strict=True):
        train(fabric, folder, first, last, load)


def train(fabric: Fabric, folder: Path, first: int, last: int, load: Path | None) -> None:
    with fabric.init_module():
        net = oracle.new_net()
    # together: its groups go by ndim, which FSDP1's and XLA's shards don't have any more
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    state = {"model": model, "optimizer": optimizer, "step": first}
    if load is not None:
        fabric.load(load, state)
        fabric.save(folder / "loaded", state)
    # one controller sees the batch of all devices; else each rank its rows of it
    size = oracle.BATCH // fabric.world_size
    mine = slice(fabric.global_rank * size, (fabric.global_rank + 1) * size)
    losses = []
    for x, y in oracle.global_batches(last)[first:]:
        loss = mse_loss(model(x[mine].to(fabric.device)), y[mine].to(fabric.device))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    fabric.save(folder / "trained", {**state, "step": last})
    if fabric.global_rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("ranks", type=int)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, nargs=2, required=True)
    parser.add_argument("--load", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    fabric = Fabric(strategy=given.strategy, devices=given.ranks, accelerator="cpu")
    first, last = given.steps
    fabric.launch(partial(train_each, folders=given.folders, first=first, last=last, loads=given.load))
