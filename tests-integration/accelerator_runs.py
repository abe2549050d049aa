"""Runs on fake devices, and prints as JSON what came of each: for ``test_any_accelerator.py``.

All are in one process, but for ``step_and_end``, which runs where that is the argument.

A process has one accelerator, and the other tests of this folder have none.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port as find_free_port
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import fsdp_core
import fsdp_fake_device
import fsdp_fsdp2
import fsdp_fsdp2.fabric
from fsdp_fake_device.control import Part

#: What is asked for on a machine with two fake devices, and can't be had.
REFUSED: dict[str, dict[str, Any]] = {
    "another accelerator": {"strategy": "fsdp2", "accelerator": "npu"},
    "too many devices": {"strategy": "fsdp2", "accelerator": "fake", "devices": 3},
    "a device twice": {"strategy": "fsdp2", "accelerator": "fake", "devices": [0, 0]},
    "Lightning's own strategy": {"accelerator": "fake", "devices": 1},
    "an unknown kind": {"strategy": "fsdp2", "accelerator": "fakee"},
}
LACKING: tuple[Part, ...] = ("collectives", "random state", "streams")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.net(batch).square().mean()
        self.mean(loss.detach())
        self.log("mean", self.mean)
        return loss

    def test_step(self, batch: Tensor) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layers(values)


class Counted(Module):
    """Twelve units, a step that does nothing but train, and what the host has waited for in each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(12)))
        self.waits: list[dict[str, int]] = []

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.waits.append(waits_until_now())


def trainer(steps: int = 1, **options: Any) -> L.Trainer:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(max_steps=steps, enable_model_summary=False, **silent, **options)


def fit(**options: Any) -> str:
    """Train a step. Returns the device that it ran on."""
    run = trainer(**options)
    run.fit(Module(), DataLoader(torch.ones(4, 4), batch_size=2))
    return str(run.strategy.root_device)


def refusal(**options: Any) -> str:
    try:
        fit(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def hide_devices() -> str:
    """What a rank of four says that sees two devices, as where SLURM hides from each rank those of the others."""
    with mock.patch.dict(os.environ, {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NAME": "train"}):
        return refusal(strategy="fsdp2", accelerator="fake", devices=4)


class Lines(logging.Handler):
    """Keeps what Lightning logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def announce_devices() -> list[str]:
    """The lines that name the device: of a Trainer in two stages, of one on the CPU, and of Fabric."""
    handler = Lines()
    loggers = [logging.getLogger(f"lightning.{each}.utilities.rank_zero") for each in ("pytorch", "fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    run = trainer(2, strategy="fsdp2", devices=[1])
    run.fit(Module(), DataLoader(torch.ones(4, 4), batch_size=2))
    run.test(Module(), DataLoader(torch.ones(4, 4), batch_size=2), verbose=False)
    fit(strategy="fsdp2", accelerator="cpu", devices=1)
    L.Fabric(strategy="fsdp2", devices=1).launch()
    for logger in loggers:
        logger.removeHandler(handler)
    return [line for line in handler.lines if line.startswith("fake")]


def scale_gradients() -> dict[str, Any]:
    """With ``precision="16-mixed"``: the scale of a step under each front end, and what was warned of.

    Besides, what is said of a scaler that torch has disabled, because its device is not there.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(strategy="fsdp2", accelerator="fake", devices=1, precision="16-mixed")
        run.fit(Module(), DataLoader(torch.ones(4, 4), batch_size=2))
        fabric = L.Fabric(strategy="fsdp2", accelerator="fake", devices=1, precision="16-mixed")
        fabric.launch()
        module = nn.Linear(4, 4)
        module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        fabric.backward(module(torch.ones(2, 4, device=fabric.device)).square().mean())
        optimizer.step()
        said = [str(each.message) for each in caught]
        for_another_device = MixedPrecision("16-mixed", "cuda")
    scalers = [run.precision_plugin.scaler, fabric.strategy.precision.scaler]
    words = ("GradScaler", "No backend of type")
    return {
        "disabled": refusal(strategy="fsdp2", accelerator="fake", devices=1, plugins=[for_another_device]),
        "scales": [scaler.get_scale() for scaler in scalers],
        "warnings": [message for message in said if any(word in message for word in words)],
    }


def find_devices() -> dict[str, Any]:
    return {
        "by its name": fit(strategy="fsdp2", accelerator="fake", devices=[1]),
        "by auto": fit(strategy="fsdp2", devices=1),
        "the CPU by its name": fit(strategy="fsdp2", accelerator="cpu", devices=1),
        "Lightning's own strategy": fit(devices=1),
        "Fabric": str(L.Fabric(strategy="fsdp2", devices=1).device),
        "how many": len(trainer(strategy="fsdp2").strategy.parallel_devices),
        "statistics": sorted(trainer(strategy="fsdp2", devices=1).accelerator.get_device_stats("fake:0"))[:1],
    }


def without_parts() -> dict[str, str]:
    """What is said of devices that lack something that a run needs."""
    messages: dict[str, str] = {}
    for part in LACKING:
        with fsdp_fake_device.without(part):
            messages[part] = refusal(strategy="fsdp2", accelerator="fake", devices=1)
    return messages


def without_pinned_memory() -> list[str]:
    with fsdp_fake_device.without("pinned memory"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = fit(strategy=fsdp_fsdp2.FSDP2Strategy(cpu_offload=True), accelerator="fake", devices=1)
    return [device, *(str(each.message) for each in caught if "pin_memory" in str(each.message))]


def waits_until_now() -> dict[str, int]:
    waits = dict(fsdp_fake_device.counters().host_syncs)
    fsdp_fake_device.reset_counters()
    return waits


def count_waits() -> dict[str, dict[str, int]]:
    """What the host waits for in the fourth step."""
    batch = torch.ones(2, 8, device="fake:0")

    def fourth_step(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any]) -> dict[str, int]:
        for _ in range(4):
            waits_until_now()
            backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return waits_until_now()

    strategy = fsdp_fsdp2.fabric.FSDP2Strategy(auto_wrap_policy={Block})
    fabric = L.Fabric(strategy=strategy, accelerator="fake", devices=1)
    fabric.launch()
    module = Counted()
    under_fabric = fourth_step(*fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)), fabric.backward)

    model = Counted().net.to("fake:0")
    mesh = init_device_mesh("fake", (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    by_hand = fourth_step(model, torch.optim.SGD(model.parameters(), lr=0.1), Tensor.backward)

    module = Counted()
    run = trainer(4, strategy=fsdp_fsdp2.FSDP2Strategy(auto_wrap_policy={Block}), accelerator="fake", devices=1)
    run.fit(module, DataLoader(torch.ones(8, 8), batch_size=2))
    return {"by hand": by_hand, "Fabric": under_fabric, "Trainer": module.waits[3]}


def move_checkpoints() -> dict[str, Any]:
    """A checkpoint of each device, read on the other: where it is then, and whether all values have the same bits."""

    def trained(accelerator: str) -> tuple[L.Fabric, Any, Any]:
        fabric = L.Fabric(strategy="fsdp2", accelerator=accelerator, devices=1)
        fabric.launch()
        module = Module()
        module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        fabric.backward(module.net(torch.ones(2, 4, device=fabric.device)).square().mean())
        optimizer.step()
        return fabric, module, optimizer

    def values_of(module: nn.Module, optimizer: Any) -> list[Tensor]:
        states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        return [
            getattr(value, "full_tensor", lambda value=value: value)().cpu()
            for value in (*module.parameters(), *states)
        ]

    moved = {}
    for saver, reader in (("fake", "cpu"), ("cpu", "fake")):
        fabric, module, optimizer = trained(saver)
        fabric.save(f"from-{saver}", {"module": module, "optimizer": optimizer})
        saved = values_of(module, optimizer)
        fabric, module, optimizer = trained(reader)
        fabric.load(f"from-{saver}", {"module": module, "optimizer": optimizer})
        loaded = values_of(module, optimizer)
        devices = sorted({each.device.type for each in module.parameters()})
        moved[f"{saver} to {reader}"] = [devices, len(saved), all(map(torch.equal, saved, loaded))]
    return moved


def compute_in_two_worlds() -> list[bool]:
    """Whether autograd's thread for a device finds the placements of a result anew: twice in each of two worlds."""

    def count_found() -> int:
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        found_in_python: int = propagator.propagate_op_sharding.cache.cache_info().misses
        statistics = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
        return found_in_python if statistics is None else found_in_python + int(statistics()[1])

    def compute(gradient: Tensor) -> None:
        before = count_found()
        tensor.mul(3.0)
        is_found_anew.append(count_found() > before)

    is_found_anew: list[bool] = []
    if dist.is_initialized():
        dist.destroy_process_group()
    for _ in range(2):
        runtime = fsdp_core.ProcessGroupRuntime()
        device = torch.device("fake", 0)
        runtime.start(rank=0, local_rank=0, world_size=1, device=device, address="127.0.0.1", port=find_free_port())
        dist.new_group([0])
        tensor = distribute_tensor(torch.ones(4, device=device), init_device_mesh("fake", (1,)), [Shard(0)])
        for _ in range(2):
            doubled = torch.ones(1, device=device, requires_grad=True) * 2
            doubled.register_hook(compute)
            doubled.backward()
        runtime.stop()
    return is_found_anew


def end_forked_ranks() -> bool:
    """Gather weights on two ranks of a notebook, which end with that; whether the first has them."""

    def gather(fabric: L.Fabric) -> Any:
        return fsdp_core.full_state_dict(fabric.setup(nn.Linear(64, 64)))

    with mock.patch.object(sys, "ps1", ">>> ", create=True):
        weights = L.Fabric(strategy="fsdp2", accelerator="fake", devices=2).launch(gather)
    return all(bool(value.isfinite().all()) for value in weights.values())


def step_and_end() -> None:
    """Take steps on two ranks, whose scripts end with that; rank 0 prints whether it has its last loss, and weights."""
    is_forked_right = "LOCAL_RANK" in os.environ or end_forked_ranks()
    fabric = L.Fabric(strategy="fsdp_native", accelerator="fake", devices=2)
    fabric.launch()
    model = nn.Linear(64, 64)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        loss = model(torch.ones(4, 64, device=fabric.device)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = fsdp_core.full_state_dict(model)
    if fabric.is_global_zero:
        values = [loss, *weights.values()]
        finite = [is_forked_right, *(bool(value.isfinite().all()) for value in values)]
        print("ANSWERS", json.dumps({"finite": finite}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["step_and_end"]:
        step_and_end()
        sys.exit()
    answers = {
        "lacking": without_parts(),  # first: a process group that is there is used
        "announced": announce_devices(),
        "scaled": scale_gradients(),
        "hidden": hide_devices(),
        "found": find_devices(),
        "refused": {name: refusal(**options) for name, options in REFUSED.items()},
        "without pinned memory": without_pinned_memory(),
        "waits": count_waits(),
        "moved": move_checkpoints(),
        "two worlds": compute_in_two_worlds(),
    }
    print("ANSWERS", json.dumps(answers))
