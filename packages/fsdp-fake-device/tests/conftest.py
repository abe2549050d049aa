"""The device is used in the process of the tests, and left as it was after each."""

from __future__ import annotations

import pytest
import torch

import fsdp_fake_device


@pytest.fixture(autouse=True)
def _device_as_it_was():
    torch.set_num_threads(1)
    yield
    fsdp_fake_device.set_delay(0)
    fsdp_fake_device.set_blocking(False)
    for device in range(torch.fake.device_count()):
        torch.fake.set_per_process_memory_fraction(1.0, device)
    torch.fake.set_device(0)
    for device in range(torch.fake.device_count()):
        torch.accelerator.synchronize(device)
    torch.fake.empty_cache()  # a stray write of a faulty program is not left to the next


@pytest.fixture
def held_back():
    """What is queued waits until it is demanded; longer than any test takes."""
    with fsdp_fake_device.with_delay(60_000):
        yield
