"""Memory of the devices is counted, limited, and used again in the order of streams."""

from __future__ import annotations

import pytest
import torch

import fsdp_fake_device

MIB = 2**20


def test_bytes_are_counted_per_device():
    before = torch.fake.memory_allocated(1), torch.fake.memory_allocated(2)
    x = torch.empty(1000, device="fake:1")
    assert torch.fake.memory_allocated(1) - before[0] == 4096  # 4000, rounded up to 512
    assert torch.fake.memory_allocated(2) == before[1]
    assert torch.accelerator.memory_allocated(1) == torch.fake.memory_allocated(1)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert torch.fake.memory_allocated(1) == before[0]
    storage.resize_(4000)
    x.fill_(1)
    assert x.sum().item() == 1000
    del x, storage
    assert torch.fake.memory_allocated(1) == before[0]


def test_peak():
    torch.fake.reset_peak_memory_stats()
    before = torch.fake.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device="fake")
    del x
    torch.empty(1024, device="fake")
    assert torch.fake.max_memory_allocated() - before == MIB
    torch.fake.reset_peak_memory_stats()
    assert torch.fake.max_memory_allocated() == before
    assert torch.fake.memory_stats()["allocated_bytes.all.peak"] == before


def test_fresh_and_freed_memory_has_no_numbers():
    assert torch.empty(64, device="fake").isnan().all()
    x = torch.ones(64, device="fake")
    address = x.data_ptr()
    del x
    y = torch.empty(64, device="fake")
    assert y.data_ptr() == address
    assert y.isnan().all()
    assert torch.empty(8, pin_memory=True).isnan().all()


def test_memory_is_used_again_on_its_own_stream_alone():
    x = torch.ones(64, device="fake")
    address = x.data_ptr()
    del x
    with torch.fake.stream(torch.fake.Stream()):
        other = torch.empty(64, device="fake")
    assert other.data_ptr() != address
    assert torch.empty(64, device="fake").data_ptr() == address


def test_recorded_stream_keeps_memory(held_back):
    side = torch.fake.Stream()
    x = torch.ones(96, device="fake")
    with torch.fake.stream(side):
        x.add(1)
    x.record_stream(side)
    address, stats = x.data_ptr(), torch.fake.memory_stats()
    del x
    assert torch.empty(96, device="fake").data_ptr() != address
    assert torch.fake.memory_allocated() == stats["allocated_bytes.all.current"] - 512
    side.synchronize()
    torch.fake.current_stream().synchronize()
    torch.empty(1000, device="fake")  # as CUDA's allocator, it looks when something is allocated
    assert torch.fake.memory_stats()["active_bytes.all.current"] <= stats["active_bytes.all.current"]


def test_what_does_not_fit_is_refused_as_cuda_refuses_it():
    torch.fake.empty_cache()
    fsdp_fake_device.set_memory_limit(torch.fake.memory_reserved() + 2 * MIB)
    x = torch.empty(MIB, dtype=torch.uint8, device="fake")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB\. Device 0 has a total capacity"):
        torch.empty(4 * MIB, dtype=torch.uint8, device="fake")
    torch.empty(4 * MIB, dtype=torch.uint8, device="fake:1")
    del x
    torch.empty(2 * MIB, dtype=torch.uint8, device="fake")  # what is cached makes room


def test_fraction_of_memory():
    free, total = torch.fake.mem_get_info()
    assert 0 < free <= total == 16 * 2**30
    torch.fake.set_per_process_memory_fraction(0.25)
    assert torch.fake.mem_get_info()[0] <= total / 4
    with pytest.raises(ValueError, match="Allowed range"):
        torch.fake.set_per_process_memory_fraction(2)


def test_cache_can_be_emptied(held_back):
    x = torch.ones(MIB, dtype=torch.uint8, device="fake")
    reserved = torch.fake.memory_reserved()
    del x
    assert torch.fake.memory_reserved() == reserved
    torch.fake.empty_cache()
    assert torch.fake.memory_reserved() <= reserved - MIB
