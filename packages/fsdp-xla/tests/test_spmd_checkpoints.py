"""What xla_fsdp_spmd has saved is loaded without compiling, and into shards on any number of devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fsdp_core.testing.oracle import adamw_groups, global_batches, new_net
from launching import LaunchingSPMD
from spmd_runs import compiled, moments, new_fabric, shapes

STEPS = 6


class Statistics(nn.Module):
    """The oracle's net with dropout and a BatchNorm, whose buffers change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = new_net(dropout=0.2, blocks=1)
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(6)
        for parameter in self.parameters():
            if seed:
                nn.init.constant_(parameter, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.net(x))
        return y


def train(fabric: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        x, y = fabric.strategy.batch_to_devices((x, y))
        loss = mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def begin(devices: int, seed: int) -> tuple[Any, ...]:
    fabric = new_fabric(None, devices)
    module = Statistics(seed)
    return fabric, module, *fabric.setup(module, adamw_groups(module))


def save(folder: Path, devices: int) -> tuple[int, int]:
    """How many programs were compiled after a save and more steps, and after a load and the same steps."""
    fabric, _, model, optimizer = begin(devices, 0)
    train(fabric, model, optimizer, global_batches(3))
    fabric.save(folder / "fabric", {"model": model, "optimizer": optimizer, "steps": 3})
    train(fabric, model, optimizer, global_batches(STEPS)[3:])
    before = compiled()
    fabric.load(folder / "fabric", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, global_batches(STEPS)[3:])
    return before, compiled()


def load(folder: Path, devices: int) -> dict[str, Any]:
    """What each device holds of the moments that another process loads, perhaps on another number of devices."""
    fabric, module, model, optimizer = begin(devices, 7)
    fabric.load(folder / "fabric", {"model": model, "optimizer": optimizer})
    return shapes(moments(module, optimizer.optimizer))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spmd_checkpoints")


@pytest.fixture(scope="module")
def saved(spmd: LaunchingSPMD, folder: Path) -> tuple[int, int]:
    found: tuple[int, int] = spmd.call(4, save, folder, 4)
    return found


@pytest.fixture(scope="module")
def loaded(folder: Path, saved: tuple[int, int]) -> dict[int, dict[str, Any]]:
    """What was loaded, by the number of devices; in processes of their own, side by side."""

    def load_on(count: int) -> tuple[int, dict[str, Any]]:
        with LaunchingSPMD() as ranks:
            return count, ranks.call(count, load, folder, count)

    with ThreadPoolExecutor(3) as threads:
        return dict(threads.map(load_on, (1, 2, 4)))


def test_loading_compiles_nothing(saved: tuple[int, int]) -> None:
    before, after = saved
    assert after == before


@pytest.mark.parametrize(("devices", "part"), [(1, (7, 6)), (2, (7, 3)), (4, (2, 6))])
def test_restored_moments_are_in_shards(loaded: dict[int, dict[str, Any]], devices: int, part: tuple[int, ...]) -> None:
    assert loaded[devices]["net.blocks.0.up.weight/exp_avg"] == [part] * devices
