"""What only a GPU would reach, looked at without one: what torch's code for GPUs gets, and what it would return."""

from __future__ import annotations

import importlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs

import fsdp_core
from fsdp_core.huggingface import held_model
from fsdp_core.testing.training import QUIET
from fsdp_core.torch_private import process_groups
from fsdp_core.torch_private.process_groups import last_collective

_CUDA = torch.device("cuda", 0)


class Regression(L.LightningModule):
    """A model whose BatchNorm stays whole under mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self) -> Tensor:
        total: Tensor = next(self.net.parameters()).sum()
        return total

    def training_step(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(batch).float(), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of one rank; its process group is destroyed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer(tmp: Path, **kwargs: Any) -> L.Trainer:
    return L.Trainer(
        strategy="fsdp2", accelerator="cpu", devices=1, max_steps=2, default_root_dir=tmp, **QUIET, **kwargs
    )


def batches() -> torch.utils.data.DataLoader[Tensor]:
    return torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=8)  # type: ignore[arg-type]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``fully_shard`` would move to the GPU at the beginning of a root's forward pass.

    On a GPU it moves the arguments, and takes the first of what it gets back. Before torch 2.13 it does so without
    looking whether there are any, and so it does here.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from fsdp_fsdp2.torch_private import unit_calls

    monkeypatch.setattr(unit_calls, "needs_argument", True)
    begin, calls = FSDPState._root_pre_forward, list[Any]()

    def as_on_gpu(self: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._state_ctx.iter_forward_root is None:
            without_tensors = [one for one in args if not isinstance(one, Tensor)]  # there is no GPU for them
            of_args, of_kwargs = _to_kwargs(tuple(without_tensors), kwargs, _CUDA, False)
            calls.append((of_args[0], of_kwargs[0]))
        return begin(self, module, args, kwargs)

    monkeypatch.setattr(FSDPState, "_root_pre_forward", as_on_gpu)
    return calls


def test_a_step_begins_on_a_gpu(moved: list[Any], tmp_path: Path) -> None:
    """A step runs in a call of the root without arguments, for which torch 2.11 raises IndexError on a GPU."""
    trainer(tmp_path).fit(Regression(), batches())
    assert len(moved) == 2


def test_a_root_without_arguments_gets_none(moved: list[Any]) -> None:
    """What torch's hook gets must not arrive in the user's forward()."""
    fabric = L.Fabric(strategy="fsdp2", accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup_module(Regression())
    assert model().ndim == 0
    assert len(moved) == 1


@pytest.fixture
def foreach_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizers step over lists of tensors by default, as they do on a GPU."""
    base = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
    monkeypatch.setattr(base, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"])


@pytest.mark.usefixtures("foreach_as_on_gpu")
def test_adamw_steps_over_parameters_that_stay_whole(tmp_path: Path) -> None:
    """torch's lists of tensors take no DTensors beside the plain weights of a BatchNorm."""
    before = torch.ones(6)
    trainer(tmp_path, precision="bf16-mixed").fit(model := Regression(), batches())
    after = fsdp_core.full_state_dict(model)
    assert after is not None
    assert not torch.equal(before, after["net.1.weight"])


def test_collectives_of_nccl_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch records those of NCCL apart from those of gloo, and each backend counts its own."""
    dist.init_process_group("gloo")
    of_gloo = _entry("gloo:all_reduce", number=5, created=1.0)
    of_nccl = _entry("nccl:_all_gather_base", number=3, created=2.0)
    for name, entry in (("_dump_fr_trace_json", of_gloo), ("_dump_nccl_trace_json", of_nccl)):
        text = json.dumps({"entries": [entry]}).encode()
        monkeypatch.setattr(process_groups._c10d, name, lambda text=text: text, raising=False)
    last = last_collective()
    assert last is not None
    assert (last.name, last.sequence) == ("nccl:_all_gather_base", 8)


def _entry(name: str, *, number: int, created: float) -> dict[str, Any]:
    return {
        "record_id": number,
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "retired": False,
        "time_created_ns": int((time.time() - 100 + created) * 1e9),
    }


def test_a_module_that_is_not_sharded_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_process_group()`` without a backend chooses NCCL for GPUs, and calls that "undefined"."""
    dist.init_process_group("gloo")
    world, group = dist.distributed_c10d._world, dist.distributed_c10d._get_default_group()
    monkeypatch.setitem(world.pg_map, group, ("undefined", world.pg_map[group][1]))
    monkeypatch.setitem(world.pg_backend_config, group, "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert held_model._default_runtime().device == _CUDA
