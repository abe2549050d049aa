"""What xla_fsdp_spmd can't do is refused before anything is trained, with what to write instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.distributed.fsdp.wrap import wrap as torch_wrap

from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.testing.oracle import Block, new_net, sgd
from fsdp_core.testing.training import Lit, loader
from launching import LaunchingSPMD
from spmd_runs import NAME, fit, new_fabric, new_trainer


def refused(make: Any, tmp: str, asked: dict[str, Any]) -> tuple[str, str]:
    """What was raised, and its message."""
    try:
        make(tmp, **asked)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


def fitted(tmp: str, **asked: Any) -> None:
    Trainer(strategy=NAME, default_root_dir=tmp, **asked).fit(Lit(), loader(1, 1))


def made(tmp: str, options: dict[str, Any] | None = None, **asked: Any) -> None:
    new_trainer(tmp, options, **asked)


def sharded(_: str, **options: Any) -> None:
    new_fabric(options).setup(new_net())


def options_of_a_unit(_: str) -> None:
    fabric = new_fabric()
    with mark_by_torch_wrap():
        net = nn.Sequential(torch_wrap(nn.Linear(4, 4), compute_dtype="bf16"))
    fabric.setup(net)


def foreign_optimizer(_: str) -> None:
    fabric = new_fabric()
    net, other = new_net(), new_net()
    fabric.setup(net, sgd(other))


def other_terms(tmp: str) -> None:
    module = Lit()
    fit(tmp, 1, module=module, max_steps=1)
    new_trainer(tmp, {"auto_wrap_policy": None}).fit(module, loader(1, 1))


#: Most are refused with this.
UNSUPPORTED = "UnsupportedCapabilityError"


#: What is done with which options, and what is raised, with what words.
REFUSED: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "devices": (
        fitted,
        {"devices": 3},
        "StrategyUnavailableError",
        ["devices=3", "XLA has 4", "CPU_NUM_DEVICES=3", "write devices=4"],
    ),
    "nodes": (
        fitted,
        {"devices": 4, "num_nodes": 2, "use_distributed_sampler": False},
        UNSUPPORTED,
        ["num_nodes=2", "one host", "strategy='xla_fsdp'"],
    ),
    "mesh": (
        sharded,
        {"tensor_parallel_size": 3, "tensor_plan": {"*.up.weight": 0}},
        UNSUPPORTED,
        ["tensor_parallel_size=3", "4 devices", "divides 4"],
    ),
    "size": (sharded, {"tensor_parallel_size": 0}, UNSUPPORTED, ["tensor_parallel_size=0", "Write 1, or more"]),
    "plan without an axis": (
        sharded,
        {"tensor_plan": {"*.up.weight": 0}},
        UNSUPPORTED,
        ["tensor_plan", "tensor_parallel_size=2"],
    ),
    "plan of nothing": (
        sharded,
        {"tensor_parallel_size": 2, "tensor_plan": {"*.top.weight": 0}},
        "ShardingError",
        ["tensor_plan['*.top.weight']", "inp.weight, blocks.0"],
    ),
    "plan of no dimension": (
        sharded,
        {"tensor_parallel_size": 2, "tensor_plan": {"*.up.*": 1}},
        "ShardingError",
        ["tensor_plan['*.up.*']=1", "'blocks.0.up.bias'", "(7,)"],
    ),
    "16-true": (made, {"precision": "16-true"}, UNSUPPORTED, ["precision='16-true'", "bf16-mixed"]),
    "16-mixed": (made, {"precision": "16-mixed"}, UNSUPPORTED, ["precision='16-mixed'", "gradient_scaling"]),
    "cpu_offload": (sharded, {"cpu_offload": True}, UNSUPPORTED, ["cpu_offload"]),
    "reshard_after_forward": (
        made,
        {"options": {"reshard_after_forward": True}},
        UNSUPPORTED,
        ["reshard_after_forward"],
    ),
    "unknown option": (made, {"options": {"process_group_backend": "nccl"}}, UNSUPPORTED, ["process_group_backend"]),
    "cuda": (fitted, {"accelerator": "cuda", "devices": 1}, "MisconfigurationException", ["CUDA"]),
    "policy": (sharded, {"auto_wrap_policy": {nn.LSTM}}, "ShardingError", ["{LSTM}", "matches no submodule of Net"]),
    "checkpointing": (
        sharded,
        {"activation_checkpointing_policy": Block},
        "ShardingError",
        ["activation_checkpointing_policy=Block", "{Block}"],
    ),
    "options of a unit": (
        options_of_a_unit,
        {},
        UNSUPPORTED,
        ["wrap(0, compute_dtype=...)", "whole model", "write wrap(module)"],
    ),
    "foreign optimizer": (foreign_optimizer, {}, "OptimizerMismatchError", ["none of the sharded model's"]),
    "other terms": (other_terms, {}, "ShardingError", ["before, with other settings", "auto_wrap_policy"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(spmd: LaunchingSPMD, tmp_path: Any, case: str) -> None:
    make, asked, error, words = REFUSED[case]
    raised, message = spmd.call(4, refused, make, str(tmp_path), asked)
    assert raised == error, message
    for word in words:
        assert word in message


# -- processes that are not as they should be --------------------------------------------------------------------------


def start(devices: int = 4) -> dict[str, Any]:
    fabric: Any = Fabric(strategy="xla_fsdp_spmd", devices=devices)
    fabric.launch()
    mesh = fabric.strategy.runtime.device_mesh
    return {"mesh": dict(mesh.shape()), "world": fabric.world_size, "variable": os.environ["CPU_NUM_DEVICES"]}


def start_after_use_without_spmd(_: str) -> None:
    import_module("torch_xla")
    torch.zeros(2).to("xla")
    start()


def start_after_a_backward_pass(_: str) -> None:
    torch.zeros(2, requires_grad=True).sum().backward()
    start()


def start_with_devices_left_open() -> Any:
    del os.environ["CPU_NUM_DEVICES"]
    return start(3)


def seed_again() -> list[list[float]]:
    """What dropout keeps on the devices, after seeds from before SPMD was started, and after others."""

    def kept(seed: int) -> list[float]:
        seed_everything(seed, verbose=False)
        start()
        dropped: list[float] = torch.nn.functional.dropout(torch.ones(64, device="xla")).tolist()
        return dropped

    return [kept(seed) for seed in (3, 3, 4, 3)]


@pytest.fixture
def fresh_spmd() -> Iterator[LaunchingSPMD]:
    """A process in which XLA has not been started."""
    with LaunchingSPMD() as pool:
        yield pool


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (start_after_use_without_spmd, "torch_xla.runtime.use_spmd()"),
        (start_after_a_backward_pass, "torch_xla.runtime.use_spmd(); torch_xla.sync()"),
    ],
    ids=["XLA used without SPMD", "autograd that knows no XLA"],
)
def test_a_process_that_is_past_it_is_refused(
    fresh_spmd: LaunchingSPMD, tmp_path: Path, make: Any, remedy: str
) -> None:
    raised, message = fresh_spmd.call(4, refused, make, str(tmp_path), {})
    assert raised == "StrategyUnavailableError", message
    assert remedy in message


def test_devices_say_how_many_the_cpu_has(fresh_spmd: LaunchingSPMD) -> None:
    assert fresh_spmd.call(4, start_with_devices_left_open) == {"mesh": {"fsdp": 3}, "world": 1, "variable": "3"}


def test_a_seed_counts_for_the_devices_each_time_it_is_set(fresh_spmd: LaunchingSPMD) -> None:
    first, again, other, third = fresh_spmd.call(4, seed_again)
    assert first == again == third != other
