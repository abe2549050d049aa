"""What the checkpoint tests run on ranks, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core.checkpoint import ChunkedTensor, SavedTensor, chunked, fill, fill_all, load, save
from fsdp_core.runtime import ProcessGroupRuntime, Runtime

KINDS = {"model": "model", "optimizer/0": "optimizer"}


class ThreadRuntime(Runtime):
    """Ranks that are threads of one process, as XLA's are on a CPU; they wait for each other at most 20 seconds."""

    def __init__(self, rank: int, world_size: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world_size, self._meeting, self._table = rank, world_size, meeting, table

    def start(self, **_: Any) -> None:
        return

    def stop(self) -> None:
        return

    def all_reduce(self, tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        raise AssertionError("a checkpoint reduces nothing")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        raise AssertionError("a checkpoint gathers no tensor")

    def gather_objects(self, obj: Any) -> list[Any]:
        self._table[self.rank] = obj
        self.barrier()
        gathered = list(self._table)
        self.barrier()
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.gather_objects(obj)[src]

    def barrier(self) -> None:
        self._meeting.wait(timeout=20)


def on_threads(
    world_size: int, work: Callable[[Any], Any], kind: Callable[..., ThreadRuntime] = ThreadRuntime
) -> list[Any]:
    """Run ``work`` on ranks that are threads; gives what each returned, or the exception that it raised."""
    meeting = threading.Barrier(world_size)
    table: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(kind(rank, world_size, meeting, table))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def whole_tensors() -> dict[str, tuple[Tensor, int | None]]:
    """Tensors and the dimension that each is sharded along (``None``: replicated), the same on every call."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "even": (normal(12, 5), 0),
        "uneven": (normal(7, 3), 0),
        "one_row": (normal(1, 4), 0),
        "vector": (normal(5), 0),
        "empty": (normal(0, 3), 0),
        "columns": (normal(4, 6), 1),
        "uneven_columns": (normal(3, 5, 2), 1),
        "last": (normal(2, 3, 7), 2),
        "scalar": (normal(), None),
        "replicated": (normal(3, 3), None),
        "bf16": (normal(6, 4, dtype=torch.bfloat16), 0),
        "fp16": (normal(5, 4, dtype=torch.float16), 0),
        "fp64": (normal(3, 2, dtype=torch.float64), 1),
        "int64": (torch.arange(-4, 5), 0),
        "bool": (torch.arange(11) % 3 == 0, 0),
        "special": (torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]), 0),
    }


def sharded(layout: str) -> dict[str, Tensor]:
    """The same as DTensors; ``plain``, ``flat`` (one mesh axis) or ``hybrid`` (replicated twice, then sharded)."""
    if layout == "plain":
        return {name: whole for name, (whole, _) in whole_tensors().items()}
    ranks = dist.get_world_size()
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    result: dict[str, Tensor] = {}
    for name, (whole, dim) in whole_tensors().items():
        placement = Replicate() if dim is None else Shard(dim)
        placements = [Replicate(), placement] if layout == "hybrid" else [placement]
        result[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return result


def started(layout: str = "flat") -> ProcessGroupRuntime:
    """This process as a rank of the world that the environment describes, or alone."""
    import os

    runtime = ProcessGroupRuntime()
    if layout != "plain":
        runtime.start(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            device=torch.device("cpu"),
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
        )
    return runtime


def save_all(path: Path, layout: str) -> None:
    """Save weights and moments as their layout has them."""
    runtime, weights = started(layout), sharded(layout)
    optimizer = {
        "state": {
            name: {"exp_avg": weight.clone(), "step": torch.tensor(5.0), "momentum_buffer": None}
            for name, weight in weights.items()
        },
        "param_groups": [{"lr": 0.1, "params": list(weights)}],
    }
    state = {"model": weights, "optimizer": [optimizer], "epoch": 3, "rank": runtime.rank}
    save(path, state, runtime=runtime, strategy="test", kinds=KINDS)


def load_all(paths: list[Path], layout: str) -> list[str]:
    """Load each of these into a layout, and compare every bit with the original; gives the names of those equal."""
    started(layout)
    for path in paths:
        load_one(path, layout)
    return [path.name for path in paths]


def load_one(path: Path, layout: str) -> None:
    """Load one checkpoint into a layout, and compare every bit with the original."""
    nest, weights = load(path), sharded(layout)
    moments = {name: weight.clone() for name, weight in weights.items()}
    for tensor in (*weights.values(), *moments.values()):
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    fill_all(weights, nest["model"])
    optimizer = nest["optimizer"][0]
    for name, moment in moments.items():
        fill(moment, optimizer["state"][name]["exp_avg"])
        step = optimizer["state"][name]["step"]
        assert isinstance(step, SavedTensor)
        assert step.full().equal(torch.tensor(5.0))
        assert optimizer["state"][name]["momentum_buffer"] is None
    expected = sharded(layout)
    for name, weight in expected.items():
        for filled in (weights[name], moments[name]):
            assert bits(filled) == bits(weight), (path.name, name)
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": list(expected)}]
    assert (nest["epoch"], nest["rank"]) == (3, 0)


def bits(tensor: Tensor) -> bytes:
    """The bytes of what this rank holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bytes(local.contiguous().flatten().view(torch.uint8).tolist()) if local.numel() else b""


def boxes_of(layout: str) -> list[tuple[str, list[tuple[tuple[int, ...], tuple[int, ...]]], int]]:
    """This rank's boxes as ours has them; torch's own are compared here, by rank."""
    started(layout)
    found = []
    for name, tensor in sharded(layout).items():
        assert isinstance(tensor, DTensor)
        mine: ChunkedTensor = chunked(tensor)
        boxes = tensor.__create_chunk_list__()
        theirs = [(tuple(box.offsets), tuple(box.sizes)) for box in boxes if 0 not in box.sizes]
        ours = [(chunk.offsets, tuple(chunk.data.shape)) for chunk in mine.chunks]
        assert ours == theirs, name
        for chunk in mine.chunks:  # it shares memory with the DTensor
            assert chunk.data.data_ptr() == tensor.to_local().data_ptr()
        found.append((name, ours, mine.replica))
    return found
