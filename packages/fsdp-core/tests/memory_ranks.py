"""What the memory tests run on ranks: the peak of a save and of a load, above what the rank holds anyway."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint_ranks import started
from damaged_folders import save_alone
from fsdp_core.checkpoint import fill_all, load, load_state_dict
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.testing.measuring.memory import peak_of

TENSORS, SIDE = 2, 4096  # 64 MiB each


def shards(mesh: DeviceMesh, layout: str, side: int, value: float) -> dict[str, Tensor]:
    """Square tensors, sharded by rows, by rows that lie in memory as columns (``strided``), or by columns."""
    ranks = mesh.size()
    found: dict[str, Tensor] = {}
    for index in range(TENSORS):
        if layout == "columns":
            local, axis = torch.full((side, side // ranks), value), 1
        else:
            local, axis = torch.full((side // ranks, side), value), 0
        if layout == "strided":
            local = torch.full((side, side // ranks), value).T
        found[f"t{index}"] = DTensor.from_local(
            local, mesh, [Shard(axis)], run_check=False, shape=torch.Size((side, side)), stride=(side, 1)
        )
    return found


def save_peak(folder: Path, layout: str) -> int:
    """The peak of a save."""
    runtime = started()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    small, state = {"model": shards(mesh, layout, 8, 1.0)}, {"model": shards(mesh, layout, SIDE, 1.0)}
    save_alone(folder / "small", small, runtime=runtime)  # what is needed once, is there then
    return peak_of(lambda: save_alone(folder / layout, state, runtime=runtime))


def load_peak(path: Path, layout: str) -> int:
    """The peak of a load into tensors that exist, verification included."""
    runtime = started()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def work(path: Path, state: dict[str, Tensor]) -> None:
        fill_all(state, load(path, runtime=runtime)["model"])

    work(path.parent / "small", shards(mesh, layout, 8, 0.0))
    state = shards(mesh, layout, SIDE, 0.0)
    peak = peak_of(lambda: work(path, state))
    assert all(tensor.to_local().eq(1.0).all() for tensor in state.values() if isinstance(tensor, DTensor))
    return peak


def import_peak(folder: Path) -> int:
    """The peak of importing a file of 240 MB, one tensor of which has 160 MB."""
    weights = {"big": torch.ones(40, 1000, 1000), **{f"{i}": torch.ones(1000, 1000) for i in range(20)}}
    for name, state in (("small", {"w": torch.ones(3)}), ("large", weights)):
        torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, folder / f"{name}.ckpt")
    del weights, state
    import_checkpoint(folder / "small.ckpt", folder / "small imported")
    return peak_of(lambda: import_checkpoint(folder / "large.ckpt", folder / "large imported"))


def whole_peak(path: Path) -> int:
    """The peak of reading everything in one process, above the tensors that it gives."""
    load_state_dict(path.parent / "small")
    found: dict[str, Tensor] = {}
    peak = peak_of(lambda: found.update(load_state_dict(path)))
    return peak - sum(tensor.nbytes for tensor in found.values())
