"""XLA's CPU devices instead of what Lightning chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.fabric.accelerators import XLAAccelerator as FabricXLAAccelerator
from lightning.pytorch.accelerators import XLAAccelerator

from fsdp_core import StrategyUnavailableError
from fsdp_core.testing.refusals import assert_says
from fsdp_xla import XLACPUAccelerator
from fsdp_xla.lightning.accelerator import accelerator_for
from fsdp_xla.lightning.cluster_environment import XLARanks
from fsdp_xla.lightning.launchers import FabricXLALauncher, TrainerXLALauncher
from launching import Launching
from xla_process import ok, run_script


@pytest.mark.parametrize("device", ["CPU", "TPU", None])
def test_it_exists_only_where_the_variable_says_so(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if device:
        monkeypatch.setenv("PJRT_DEVICE", device)
    assert XLACPUAccelerator.is_available() is (device == "CPU")


@pytest.mark.parametrize(("asked", "count"), [(2, 2), ("3", 3), ([0, 1], 2), (-1, 4), ("-1", 4)])
def test_it_counts_devices(monkeypatch: pytest.MonkeyPatch, asked: Any, count: int) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    devices = XLACPUAccelerator.get_parallel_devices(XLACPUAccelerator.parse_devices(asked))
    assert devices == [torch.device("xla", index) for index in range(count)]


def test_lightnings_choice_of_the_cpu_means_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert isinstance(accelerator_for("xla_fsdp", CPUAccelerator()), XLACPUAccelerator)
    own = XLACPUAccelerator()
    assert accelerator_for("xla_fsdp", own) is own


def test_the_cpu_is_refused_where_xla_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(StrategyUnavailableError, match="accelerator='tpu'; to try it on the CPU, set PJRT_DEVICE=CPU"):
        accelerator_for("xla_fsdp", CPUAccelerator())
    with pytest.raises(StrategyUnavailableError, match="the accelerator is CUDAAccelerator"):
        accelerator_for("xla_fsdp", CUDAAccelerator())


def test_it_has_no_figures_and_a_name_of_its_own() -> None:
    """Which callbacks such as ``DeviceStatsMonitor`` ask for, and messages contain."""
    accelerator = XLACPUAccelerator()
    assert accelerator.get_device_stats(torch.device("xla", 0)) == {}
    assert accelerator.name() == "xla_cpu"


def test_ranks_are_started_by_the_launcher_in_notebooks_too() -> None:
    """Lightning asks the environment who starts ranks, and the launcher whether it can in a notebook."""
    ranks = XLARanks()
    ranks.set_world_size(3)
    assert (ranks.creates_processes_externally, XLARanks.detect(), ranks.world_size()) == (False, False, 3)
    assert FabricXLALauncher(2).is_interactive_compatible
    assert TrainerXLALauncher(2).is_interactive_compatible


def told(strategy: Any) -> list[Any]:
    devices = [str(device) for device in strategy.parallel_devices]
    return [type(strategy.accelerator).__name__, strategy.num_processes, devices]


def trainer(strategy: Any = "xla_fsdp", **kwargs: Any) -> Any:
    quiet: dict[str, Any] = {"devices": 2, "logger": False, "enable_checkpointing": False}
    return L.Trainer(strategy=strategy, **{**quiet, **kwargs}).strategy


def chosen() -> list[list[Any]]:
    return [
        told(trainer()),
        told(trainer(accelerator="cpu")),
        told(trainer(accelerator=XLACPUAccelerator(), devices=-1)),
        told(L.Fabric(strategy="xla_fsdp", devices=2).strategy),
    ]


def test_xlas_devices_are_chosen(launching: Launching) -> None:
    """With ``accelerator`` left out, "cpu", and given; and by Fabric."""
    assert launching.call(2, chosen) == [["XLACPUAccelerator", 2, ["xla:0", "xla:1"]]] * 4


def precisions() -> list[str]:
    from fsdp_xla import XLAFSDPStrategy, fabric

    asked: dict[str, Any] = {"precision": "bf16-mixed"}
    return [
        trainer(**asked).precision_plugin.precision,
        trainer(XLAFSDPStrategy(), **asked).precision_plugin.precision,
        L.Fabric(strategy="xla_fsdp", devices=2, **asked).strategy.precision.precision,
        L.Fabric(strategy=fabric.XLAFSDPStrategy(), devices=2, **asked).strategy.precision.precision,
    ]


def test_precision_is_that_asked_for_by_name_and_by_instance(launching: Launching) -> None:
    assert launching.call(2, precisions) == ["bf16-mixed"] * 4


@contextmanager
def as_on_a_tpu() -> Iterator[None]:
    """A context in which Lightning's accelerator counts two devices: nothing here has a chip that it could find."""
    with pytest.MonkeyPatch.context() as patch:
        for one in (FabricXLAAccelerator, XLAAccelerator):
            patch.setattr(one, "auto_device_count", staticmethod(lambda: 2))
            patch.setattr(one, "is_available", staticmethod(lambda: True))
        yield


@as_on_a_tpu()
def on_a_tpu() -> list[Any]:
    strategy = trainer(accelerator="tpu", precision="bf16-mixed")
    return [*told(strategy), strategy.precision_plugin.precision]


@as_on_a_tpu()
def fabric_on_a_tpu() -> list[Any]:
    strategy = L.Fabric(strategy="xla_fsdp", accelerator="tpu", devices=2, precision="bf16-mixed").strategy
    return [*told(strategy), strategy.precision.precision]


@as_on_a_tpu()
def spmd_fabric_on_a_tpu() -> list[Any]:
    from lightning.fabric.strategies import XLAFSDPStrategy as LightningsXLAFSDPStrategy

    strategy = L.Fabric(strategy="xla_fsdp_spmd", accelerator="tpu", devices=2).strategy
    return [*told(strategy), isinstance(strategy, LightningsXLAFSDPStrategy)]


@pytest.mark.parametrize("made", [on_a_tpu, fabric_on_a_tpu])
def test_on_a_tpu_ranks_are_its_devices(launching: Launching, made: Any) -> None:
    assert launching.call(2, made) == ["XLAAccelerator", 2, ["xla:0", "xla:1"], "bf16-mixed"]


def test_on_a_tpu_spmd_is_one_rank(launching: Launching) -> None:
    found = launching.call(2, spmd_fabric_on_a_tpu)
    assert found == ["XLAAccelerator", 1, ["xla:0", "xla:1"], True]  # Lightning's accelerator asks for its own


def used_before() -> None:
    torch.zeros(1, device="xla").cpu()
    L.Fabric(strategy="xla_fsdp", devices=2).launch(lambda fabric: None)


def test_xla_used_before_the_launch_is_refused(afresh: Launching) -> None:
    told = afresh.error(2, used_before)
    for words in ("XLA has been used in this process before", "Touch no XLA device before"):
        assert words in told


def test_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    """As on a TPU; on the CPU there is one process, with a thread for each device."""
    found = ok(run_script("launch_processes.py", 2, tmp_path), "found")
    for result in found["launches"]:
        assert (result["rank"], result["ranks"], result["unchanged"]) == (0, 2, True)
        assert result["pid"] != found["pid"]
        assert set(result["drawn"]) == {0.0, 2.0}
    assert found["launches"][0]["drawn"] == found["launches"][1]["drawn"]  # as seeded before each
    assert not found["changed"]
    assert_says(found["refused"], "XLA has been used in this process before the ranks start", "Touch no XLA device")
