"""Trains the suite's net under Fabric with the strategy of a name, on from a folder and into one; see test_xla.py.

Usage: any_strategy.py STRATEGY RANKS STEPS FOLDER[=CHECKPOINT]...

Writes, into each FOLDER: ``loaded``, what was loaded, saved again at once; ``trained``, after so many steps more; and
``losses.json``. If there are several, it trains one after the other, each time with a net of its own.
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


def train_each(fabric: Fabric, steps: int, places: list[str]) -> None:
    for folder, _, load in (place.partition("=") for place in places):
        train(fabric, Path(folder), steps, load)


def train(fabric: Fabric, folder: Path, steps: int, load: str) -> None:
    first, last = (steps, 2 * steps) if load else (0, steps)
    with fabric.init_module():
        net = oracle.new_net()
    # together: its groups go by ndim, which FSDP1's and XLA's shards don't have any more
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    state = {"model": model, "optimizer": optimizer, "step": first}
    if load:
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
    parser.add_argument("steps", type=int)
    parser.add_argument("places", nargs="+")
    given = parser.parse_args()
    fabric = Fabric(strategy=given.strategy, devices=given.ranks, accelerator="cpu")
    fabric.launch(partial(train_each, steps=given.steps, places=given.places))
