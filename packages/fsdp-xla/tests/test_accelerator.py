"""XLA's CPU devices instead of what Lightning chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator

from fsdp_core import StrategyUnavailableError
from fsdp_xla import XLACPUAccelerator
from fsdp_xla.lightning.accelerator import accelerator_for
from xla_process import error, run_script


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


def test_devices_and_ranks_by_name(tmp_path: Path) -> None:
    """By name and by instance, with ``accelerator`` left out, "cpu", and given."""
    results = run_script("accelerators.py", 2, tmp_path)
    told = error(results, "used before")
    for words in ("XLA has been used in this process before", "Touch no XLA device before"):
        assert words in told
    del results["used before"]
    assert results == {
        "auto": ["XLACPUAccelerator", 2, ["xla:0", "xla:1"]],
        "cpu": ["XLACPUAccelerator", 2, ["xla:0", "xla:1"]],
        "given": ["XLACPUAccelerator", 2, ["xla:0", "xla:1"]],
        "fabric": ["XLACPUAccelerator", 2, ["xla:0", "xla:1"]],
        "precision": ["bf16-mixed", "bf16-mixed", "bf16-mixed", "bf16-mixed"],
        "tpu": ["XLAAccelerator", 2, ["xla:0", "xla:1"], "bf16-mixed"],
        "tpu fabric": ["XLAAccelerator", 2, ["xla:0", "xla:1"], "bf16-mixed"],
        "tpu fabric, SPMD": ["XLAAccelerator", 1, ["xla:0", "xla:1"], True],  # Lightning's accelerator asks for its own
    }
