"""What Ray Train and notebooks refuse, without either; tests-integration/launchers/ has them."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.launchers.notebooks import FabricForkedRanks, check_interactive
from fsdp_core.lightning.launchers.ray_train import RayWorker, ray_worker
from fsdp_core.runtime import ProcessGroupRuntime


def worker(device: str, *, local_rank: int = 0, local_world_size: int = 2) -> RayWorker:
    return RayWorker(
        rank=local_rank,
        world_size=4,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=1,
        device=torch.device(device),
    )


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [
        ("cpu", ["cpu"], None),  # "auto"
        ("cpu", ["cpu"] * 2, None),
        ("cpu", ["cpu"] * 3, "devices=3 contradicts Ray Train, which has started 2 of its 4 workers"),
        ("cuda:1", ["cuda:0", "cuda:1"], None),
        ("cuda:2", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], None),  # two GPUs for each worker
        ("cuda:0", ["cuda:0"], "devices=1 contradicts Ray Train"),
        ("cuda:1", ["cuda:0"], "the device 'cuda:1', which is not among .*: cuda:0\\."),
        (
            "cpu",
            ["xpu:0", "xpu:1"],
            "the device 'cpu', which is not among .*\n?.*accelerator='cpu' and devices='auto'; or let Ray",
        ),
    ],
)
def test_devices_are_those_that_ray_gave(device: str, given: list[str], message: str | None) -> None:
    devices = [torch.device(one) for one in given]
    if message is None:
        worker(device).check_devices(devices)
        return
    with pytest.raises(UnsupportedCapabilityError, match=message):
        worker(device).check_devices(devices)


def test_the_number_of_nodes_is_rays() -> None:
    alone = ProcessGroupRuntime()
    assert (worker("cpu").count_nodes(alone, 1), worker("cpu").count_nodes(alone, 2)) == (2, 2)
    with pytest.raises(UnsupportedCapabilityError, match="num_nodes=3 contradicts Ray Train, whose 4 workers run on 2"):
        worker("cpu").count_nodes(alone, 3)


def test_without_ray_nothing_is_asked() -> None:
    assert ray_worker(object(), object) is None


def test_a_notebook_has_ranks_on_its_host_if_it_can_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    check_interactive("fsdp2", 1)
    with pytest.raises(UnsupportedCapabilityError, match="num_nodes=2 in a notebook"):
        check_interactive("fsdp2", 2)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(UnsupportedCapabilityError, match="Write devices=1; or write the cells to a file"):
        check_interactive("fsdp2", 1)


def test_cuda_must_not_be_initialised_before_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    strategy: Any = SimpleNamespace(root_device=torch.device("cuda", 0), strategy_name="fsdp2")
    with pytest.raises(UnsupportedCapabilityError, match="Restart the kernel"):
        FabricForkedRanks(strategy).launch(print)
