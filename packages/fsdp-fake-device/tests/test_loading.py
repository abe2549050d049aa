"""How the device is compiled and loaded, and processes that are forked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fsdp_fake_device
from fsdp_fake_device import build

pytestmark = pytest.mark.everything


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", script], env=settings, capture_output=True, text=True, timeout=120, check=False
    )


def test_import_of_torch_loads_it_where_it_is_asked_for():
    script = "import torch, sys; print(torch.accelerator.device_count(), 'fsdp_fake_device' in sys.modules)"
    assert run(script, FSDP_FAKE_DEVICES="3").stdout.split() == ["3", "True"]
    assert run(script, FSDP_FAKE_DEVICES="0").stdout.split()[1] == "False"


def test_settings_that_are_no_numbers_are_named():
    failed = run("import fsdp_fake_device", FSDP_FAKE_DEVICE_DELAY="soon")
    assert "FSDP_FAKE_DEVICE_DELAY=soon is no whole number" in failed.stderr


def test_settings_are_read():
    script = """
import fsdp_fake_device as device, torch
print(*device.get_delay(), torch.fake.mem_get_info()[1], torch.fake.device_count())
"""
    settings = {"FSDP_FAKE_DEVICE_DELAY": "7", "FSDP_FAKE_DEVICE_MEMORY": "1000000", "FSDP_FAKE_DEVICES": "2"}
    settings["FSDP_FAKE_DEVICE_HELD"] = "side"
    assert run(script, **settings).stdout.split() == ["7", "side", "1000000", "2"]


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_FAKE_DEVICE_BUILD", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match=r"c\+\+ and ninja is not on the path. Install a C\+\+ compiler"):
        build.load_extension()


def test_another_torch_has_another_build(monkeypatch):
    before = build.choose_directory()
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert build.choose_directory() != before


def test_forked_child_of_a_process_that_used_the_device_is_refused():
    torch.ones(1, device="fake")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="fake")
            message = "no error"
        except RuntimeError as error:
            message = f"{torch.fake._is_in_bad_fork()} {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read().startswith("True Cannot re-initialize the fake device in forked subprocess")
    os.waitpid(child, 0)
    assert not torch.fake._is_in_bad_fork()


def test_forked_child_of_a_process_that_did_not_use_it_is_served():
    script = """
import os, fsdp_fake_device, torch
torch.manual_seed(1)
assert not torch.fake.is_initialized()
if os.fork() == 0:
    assert torch.ones(3, device="fake").sum().item() == 3
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert run(script).stdout.split() == ["7"]


def test_process_ends_while_kernels_wait():
    script = """
import fsdp_fake_device, torch
fsdp_fake_device.set_delay(60_000)
keep = torch.ones(8, device="fake").mul(2)
print(torch.fake.current_stream().query())
"""
    ended = run(script)
    assert (ended.returncode, ended.stdout.split()) == (0, ["False"])


def test_counters_are_those_of_the_device():
    fsdp_fake_device.reset_counters()
    torch.ones(4, device="fake").add_(1)
    assert fsdp_fake_device.counters().kernels == 2
