"""What real ranks write with torch's own distributed checkpoint, for the tests of imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def weights() -> dict[str, Tensor]:
    """A model's state: uneven, bf16, 0-dim, with fewer rows than ranks, and whole on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.weight": torch.randn(7, 3, generator=generator),
        "blocks.0.bias": torch.randn(7, generator=generator).bfloat16(),
        "short": torch.randn(2, 5, generator=generator),
        "scale": torch.tensor(2.5),
        "count": torch.tensor([3, 4]),
    }


def optimizer() -> dict[str, Any]:
    """An AdamW's state by parameter name, its second group never stepped."""
    names = ["blocks.0.weight", "short"]
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": weights()[name] * 2} for name in names}
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.95), "params": names},
        {"lr": 0.2, "betas": (0.9, 0.95), "params": ["scale"]},
    ]
    return {"state": moments, "param_groups": groups}


def save_with_torch(folder: Path, layout: str) -> None:
    """Let all ranks save with torch: by its own files, as torchtitan does, as accelerate does, or as safetensors."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sharded(item) for key, item in value.items()}
        if isinstance(value, Tensor) and value.ndim > 0:
            return distribute_tensor(value, mesh, [Shard(value.ndim - 1) if value.ndim == 2 else Replicate()])
        return value

    model, state = sharded(weights()), optimizer()
    optim = {"state": sharded(state["state"]), "param_groups": state["param_groups"]}
    if layout == "plain":
        dcp.save({"model": model, "optim": optim, "epoch": 4, "rng": torch.arange(5)}, checkpoint_id=folder)
    elif layout == "torchtitan":
        flat = {f"state.{name}.{key}": v for name, values in optim["state"].items() for key, v in values.items()}
        for group in optim["param_groups"]:
            settings = {key: value for key, value in group.items() if key != "params"}
            flat |= {f"param_groups.{name}.{key}": v for name in group["params"] for key, v in settings.items()}
        rest = {"train_state": {"step": torch.tensor(4)}, "dataloader": {"dp_rank_0": b"\x80\x04.", "world_size": 2}}
        dcp.save({**model, "optimizer": flat, **rest}, checkpoint_id=folder)
    elif layout == "accelerate":
        dcp.save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": optim}, checkpoint_id=folder / "optimizer_0")
    else:
        whole = {name: tensor for name, tensor in model.items() if tensor.ndim}
        dcp.save(whole, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
