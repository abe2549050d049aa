"""What the plugin says of itself, and where it runs."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import fsdp_core
import fsdp_xla
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.plugins import availability, registry
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_xla import plugin
from fsdp_xla.classic.options import XLAFSDPOptions
from fsdp_xla.plugin import fsdp_strategies, why_not_here

NAMES = ["xla_fsdp", "xla_fsdp_full", "xla_fsdp_spmd"]


def test_it_is_found_under_its_three_names() -> None:
    assert [info.name for info in fsdp_strategies()] == NAMES
    for name in NAMES:
        assert registry.provider(name).name == "fsdp-xla"
        assert registry.FIRST_PARTY[name] == "fsdp-xla"
    assert fsdp_core.describe("xla_fsdp").presets == {}
    assert fsdp_core.describe("xla_fsdp_full").presets == {"state_dict_type": "full"}
    assert fsdp_xla.__version__ == registry.provider("xla_fsdp").version


@pytest.mark.parametrize("name", NAMES)
def test_all_options_are_listed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    taken: set[str] = set()
    for front_end in ("trainer", "fabric"):
        for parameter in inspect.signature(fsdp_core.resolve(name, front_end)).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                taken.add(parameter.name)
    assert {option.name for option in fsdp_core.describe(name).options} == taken
    assert "spmd" in name or taken > set(XLAFSDPOptions.wrapper_argument_names())


#: What others' options may say, and what is refused of them, each with words of its line.
ALWAYS: dict[str, dict[str, Any]] = {
    "xla_fsdp": {"use_orig_params": True, "sync_module_states": True, "tensor_parallel_size": 1},
    "xla_fsdp_spmd": {"use_orig_params": True, "sharding_strategy": "FULL_SHARD", "timeout": None},
}
REFUSED: dict[str, dict[str, tuple[Any, str]]] = {
    "xla_fsdp": {
        "cpu_offload": (True, "can't do cpu_offload=True"),
        "sync_module_states": (False, "sync_module_states: Leave it out: rank 0's values always win."),
        "tensor_parallel_size": (2, "tensor_parallel_size: It is one of: xla_fsdp_spmd."),
        "mp_policy": (object(), "mp_policy: Write precision='bf16-mixed'"),
    },
    "xla_fsdp_spmd": {
        "cpu_offload": (True, "can't do cpu_offload=True"),
        "reshard_after_forward": (False, "can't do reshard_after_forward=False"),
        "sharding_strategy": ("NO_SHARD", "sharding_strategy: Leave it out: parameters are always sharded"),
        "tensor_plen": ({}, "tensor_plen: Did you mean 'tensor_plan'?"),
    },
}


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
@pytest.mark.parametrize("name", ALWAYS)
def test_others_options(monkeypatch: pytest.MonkeyPatch, name: str, front_end: FrontEnd) -> None:
    """What always happens may be said; what can't be is told together."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    made = fsdp_core.resolve(name, front_end)
    made(**ALWAYS[name])
    options = {option: value for option, (value, _) in REFUSED[name].items()}
    assert_says(refusal(UnsupportedCapabilityError, lambda: made(**options)), *(w for _, w in REFUSED[name].values()))


@pytest.mark.parametrize(
    ("device", "chips", "told"),
    [
        ("CPU", 0, None),
        ("", 4, None),
        ("TPU", 4, None),
        ("", 0, "PJRT_DEVICE is not set"),
        ("TPU", 0, "PJRT_DEVICE is 'TPU'"),
        ("CUDA", 4, "PJRT_DEVICE is 'CUDA'"),
    ],
)
def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, device: str, chips: int, told: str | None) -> None:
    monkeypatch.setenv("PJRT_DEVICE", device)
    monkeypatch.setattr(plugin, "_tpu_chips", lambda: chips)
    reason = why_not_here()
    if told is None:
        assert reason is None
    else:
        assert reason is not None
        assert told in reason
        assert "PJRT_DEVICE=CPU and CPU_NUM_DEVICES=2" in reason


def test_googles_devices_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the machine's PCI devices, some of which may not be read."""
    for device, vendor in {"0": "0x1ae0", "1": "0x10de", "2": "0x1ae0"}.items():
        (tmp_path / device).mkdir()
        (tmp_path / device / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "3" / "vendor").mkdir(parents=True)  # raises an OSError when it is read
    monkeypatch.setattr(plugin, "Path", lambda place: tmp_path if place == "/sys/bus/pci/devices" else Path(place))
    assert plugin._tpu_chips() == 2


@pytest.mark.parametrize("device", ["CPU", None])
def test_fsdp_list_on_a_machine_without_a_tpu(device: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    environment |= {"PJRT_DEVICE": device} if device else {}
    command = [sys.executable, "-m", "fsdp_core", "list", "--json"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    rows = {row["name"]: row for row in json.loads(listed.stdout)["strategies"]}
    for name in NAMES:
        assert rows[name]["runs_here"] is (device == "CPU")
        assert "PJRT_DEVICE=CPU" in (rows[name]["reason"] or "PJRT_DEVICE=CPU")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("package", "installed", "told"),
    [
        ("torch_xla", None, ['needs torch_xla==2.9.*, which is not installed; type: pip install "torch_xla==2.9.*"']),
        ("torch_xla", "2.8.1", ["needs torch_xla==2.9.*, but 2.8.1 is installed"]),
        ("torch", "2.13.0", ["needs torch==2.9.*, but 2.13.0 is installed", 'pip install "torch==2.9.*"']),
    ],
)
def test_torch_xla_missing_or_of_another_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, installed: str | None, told: list[str]
) -> None:
    found = availability.version

    def version(asked: str) -> str:
        if asked != package:
            return found(asked)
        if installed is None:
            raise PackageNotFoundError(asked)
        return installed

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(availability, "version", version)
    with pytest.raises(fsdp_core.StrategyUnavailableError) as raised:
        fsdp_core.resolve(name, "trainer")
    for words in (f"strategy {name!r}", *told):
        assert words in str(raised.value)
