"""What the tests of faults run on ranks: a checkpoint of equal shards, and a whole restore from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_ranks import bits, started
from damaged_folders import save_alone
from fsdp_core.checkpoint import fill, fill_all, load

ROWS = 12  # two and three ranks hold files of one size


def weights(value: float) -> dict[str, Tensor]:
    """Two sharded tensors of one shape, and a vector."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 4.0).reshape(ROWS, 4)
    return {
        "w": distribute_tensor(whole + value, mesh, [Shard(0)], src_data_rank=None),
        "v": distribute_tensor(whole - value, mesh, [Shard(0)], src_data_rank=None),
        "scale": distribute_tensor(torch.full((ROWS,), value), mesh, [Shard(0)], src_data_rank=None),
    }


def save_fresh(path: Path, value: float = 100.0) -> None:
    """Save weights, moments, a callback's tensor and plain data: every kind of file there is."""
    runtime, model = started(), weights(value)
    optimizer = {
        "state": {name: {"exp_avg": tensor * 2} for name, tensor in model.items()},
        "param_groups": [{"lr": 0.1, "params": list(model)}],
    }
    state = {"model": model, "optimizer": [optimizer], "callbacks": {"best": torch.tensor(value)}, "epoch": 3}
    save_alone(path, state, runtime=runtime)


def restore(paths: list[Path], verify: bool = True) -> tuple[str, bool]:
    """Load a checkpoint as a front end does; each rank its own path, or the last that there is.

    Returns:
        The error, or ``""``; and whether any bit of a weight or a moment is another one than before.
    """
    runtime, model = started(), weights(0.0)
    moments = {name: tensor * 3 for name, tensor in model.items()}
    before = [bits(tensor) for tensor in (*model.values(), *moments.values())]
    error = ""
    try:
        nest = load(paths[min(runtime.rank, len(paths) - 1)], runtime=runtime, verify=verify)
        saved: dict[str, Any] = {name: entry["exp_avg"] for name, entry in nest["optimizer"][0]["state"].items()}
        fill_all(model, nest["model"], check_only=True)
        fill_all(moments, saved, check_only=True)
        fill_all(model, nest["model"])
        for name, moment in moments.items():
            fill(moment, saved[name])
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, before != [bits(tensor) for tensor in (*model.values(), *moments.values())]
