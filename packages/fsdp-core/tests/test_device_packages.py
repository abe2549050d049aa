"""Packages that register a kind of device with torch, where they are broken, or where there is no device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import Site
from fsdp_core import devices
from fsdp_core.gradients.gathered_values import WrittenValues
from fsdp_core.testing.refusals import assert_says

DOCTOR = "from fsdp_core.cli import main; main()"
WITHOUT_DEVICE = """
    import torch

    class Module:
        is_available = staticmethod(lambda: False)
        is_initialized = staticmethod(lambda: False)
        device_count = staticmethod(lambda: 0)

    def load():
        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", Module)
"""


def install(site: Site, source: str) -> None:
    """Install a package whose function ``load`` torch calls when it is imported."""
    site.distribution("torch-vendor", version="9.1", modules={"torch_vendor": source})
    entry_points = site.path / "torch_vendor-9.1.dist-info" / "entry_points.txt"
    entry_points.write_text("[torch.backends]\nvendor = torch_vendor:load\n")


def test_doctor_says_why_a_package_does_not_load_and_how_to_leave_it_out(site: Site) -> None:
    install(site, "raise ImportError('libvendor.so: cannot open shared object file')")
    doctor = site.run(sys.executable, "-c", DOCTOR, "doctor", "--json", check=False)
    (finding,) = [each for each in json.loads(doctor.stdout)["findings"] if each["what"].startswith("torch: ")]
    assert finding["level"] == "broken"
    assert finding["what"].endswith("Because of ImportError: libvendor.so: cannot open shared object file")
    assert_says(
        finding["remedy"],
        "to run without ",  # and before it fsdp-fake-device, where that is installed
        "torch-vendor 9.1, which torch loads when it is imported, set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "write `import fsdp_core.lightning` in the script",
    )


def test_doctor_notes_a_package_without_a_device(site: Site) -> None:
    install(site, WITHOUT_DEVICE)
    doctor = site.run(sys.executable, "-c", DOCTOR, "doctor", "--json", check=False)
    facts = json.loads(doctor.stdout)
    assert "torch-vendor 9.1" in facts["device_packages"]
    (note,) = [each for each in facts["findings"] if each["what"].startswith("torch's accelerator is 'npu'")]
    assert note["level"] == "note"
    assert_says(note["remedy"], "to run without ", "torch-vendor 9.1")
    shown = site.run(sys.executable, "-c", DOCTOR, "doctor", "--device", "npu", check=False)
    assert shown.returncode == 1
    assert_says(shown.stdout, "Needed: accelerator", "there is no device", "device module   not tried")


def test_without_a_device_auto_is_the_cpu_and_the_kind_is_refused(site: Site) -> None:
    install(site, WITHOUT_DEVICE)
    site.provide("any-plugin", 'name="anywhere", trainer="a:B", accelerators=("any", "cpu"), summary="s"')
    done = site.forked(
        """
        import lightning as L
        from fsdp_core import devices

        assert devices.accelerator_kind() == "npu"
        for accelerator in ("npu", "tpu", "npuu", "xyz", "npu,cpu", ["npu", "cpu"]):
            print(failure(lambda: L.Trainer(strategy="anywhere", accelerator=accelerator, logger=False)))
        from fsdp_core.lightning.accelerators import TorchAccelerator
        for number in ("two", -2, 1.5):
            print(failure(lambda: TorchAccelerator.parse_devices(number)))
        assert devices.current_device(initialize=True).type == "cpu"
        assert not devices.can_pin_memory("npu")
        assert L.Trainer(strategy="auto", accelerator="auto", logger=False).strategy.root_device.type == "cpu"
        """,
        ASCEND_RT_VISIBLE_DEVICES="",
    )
    assert_says(
        done.stdout,
        "accelerator='npu': torch",
        "knows this kind of device, and sees none here.",
        "`fsdp doctor --device npu`, which says what is missing, and look at ASCEND_RT_VISIBLE_DEVICES",
        "accelerator='tpu': torch",
        "Install torch_tpu (pip install torch-tpu)",
        "with torch_xla, write a strategy that `fsdp list` shows on 'xla'",
        "accelerator='npuu': neither Lightning nor torch",
        "knows such a device here. Did you mean 'npu'?",
        "accelerator='xyz': neither",
        "Known are auto, cpu, cuda, gpu, mps, npu, tpu; and with packages of theirs, hpu, mlu, musa,",
        "torch.utils.rename_privateuse1_backend('xyz')",
        "`fsdp doctor --device xyz`",
        "accelerator='npu,cpu': a run is on devices of one kind",
        "accelerator=['npu', 'cpu']: a run is on devices of one kind.",
        *(f"devices={number!r} is neither a number of devices nor their indices" for number in ("two", -2, 1.5)),
    )


@pytest.mark.parametrize("has_function", [True, False])
def test_the_random_state_is_asked_of_torch_where_torch_has_a_function(site: Site, has_function: bool) -> None:
    """torch_tpu refuses calls of its module's function in the versions of torch that have their own."""
    install(
        site,
        """
        import types
        import torch

        class Module:
            is_available = staticmethod(lambda: True)
            device_count = staticmethod(lambda: 1)
            get_rng_state = staticmethod(lambda device: f"the module's of {device}")

        def load():
            torch.utils.rename_privateuse1_backend("npu")
            torch._register_device_module("npu", Module)
        """,
    )
    done = site.forked(
        f"""
        import types
        import torch
        from fsdp_core import devices

        if {has_function}:
            torch.accelerator.random = types.SimpleNamespace(get_rng_state=lambda device: f"torch's of {{device}}")
        elif hasattr(torch.accelerator, "random"):
            del torch.accelerator.random
        print(devices.random_state(torch.device("npu", 0)))
        assert devices.random_state(torch.device("cpu")).equal(torch.get_rng_state())
        """
    )
    assert done.stdout.strip() == ("torch's of npu:0" if has_function else "the module's of npu:0")


def test_a_device_that_only_emulates_bf16_does_not_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports_bf16(is_bf16_supported: Callable[..., bool]) -> bool:
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(is_bf16_supported=is_bf16_supported))
        return devices.supports_bf16(torch.device("xpu"))

    monkeypatch.setattr(devices, "accelerator_kind", lambda: "xpu")
    assert not supports_bf16(lambda including_emulation=True: including_emulation)
    assert supports_bf16(lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    monkeypatch.setattr(devices, "accelerator_kind", lambda: "meta")
    assert not devices.supports_bf16(torch.device("meta"))  # which can't be asked, and computes nothing


def test_memory_that_the_host_has_not_got_is_not_a_device_without_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [torch.OutOfMemoryError("no memory"), RuntimeError("no allocator"), RuntimeError("no allocator")]

    def fail(*_: Any, **__: Any) -> None:
        raise failures.pop(0)

    def report_failure() -> None:
        raise RuntimeError("a kernel has failed")

    monkeypatch.setattr(devices, "accelerator_kind", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", fail)
    devices.can_pin_memory.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        devices.can_pin_memory("xpu")
    monkeypatch.setattr(torch.accelerator, "synchronize", report_failure)
    with pytest.raises(RuntimeError, match="a kernel has failed"):
        devices.can_pin_memory("xpu")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with pytest.warns(RuntimeWarning, match="no allocator"):
        assert not devices.can_pin_memory("xpu")
    devices.can_pin_memory.cache_clear()


def test_a_device_without_float64_is_asked_once_and_summed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("Required aspect fp64 is not supported on the device")

    devices.has_float64.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(devices, "accelerator_kind", lambda: "xpu")
        patched.setattr(torch, "ones", refuse)
        assert devices.has_float64("cpu")
        assert not devices.has_float64("xpu")
    devices.has_float64.cache_clear()
    monkeypatch.setattr(devices, "has_float64", lambda kind: False)
    values = WrittenValues()
    values.add("weight", torch.full((2,), 0.5))
    assert values.take() == {"weight": (1.0, 0.5**0.5)}
