"""Streams and events, what waits, and what is counted."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader

import fsdp_fake_device


def count_syncs() -> dict[str, int]:
    return dict(fsdp_fake_device.counters().host_syncs)


def test_kernels_run_while_the_host_goes_on():
    fsdp_fake_device.sleep(1000)
    x = torch.ones(4, device="fake").mul_(3)
    assert not torch.fake.current_stream().query()
    assert x.sum().item() == 12
    assert torch.fake.current_stream().query()


def test_what_is_held_back_runs_when_it_is_demanded(held_back):
    x = torch.ones(4, device="fake").mul_(3)
    time.sleep(0.1)
    assert not torch.fake.current_stream().query()
    assert x.sum().item() == 12


def test_streams_run_beside_each_other(held_back):
    busy, idle = torch.fake.Stream(), torch.fake.Stream()
    with torch.fake.stream(busy):
        torch.ones(4, device="fake")
    with torch.fake.stream(idle):
        x = torch.ones(4, device="fake")
    idle.synchronize()
    assert idle.query()
    assert not busy.query()
    assert x.sum().item() == 4


def test_current_stream():
    stream, before = torch.fake.Stream(priority=-1), torch.fake.current_stream()
    with torch.fake.stream(stream):
        assert torch.fake.current_stream() == stream == torch.accelerator.current_stream()
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.fake.current_stream() == before == torch.fake.default_stream()
    assert torch.fake.current_stream(1) != before


def test_events(held_back):
    stream = torch.fake.Stream()
    start, end = torch.fake.Event(enable_timing=True), torch.fake.Event(enable_timing=True)
    with torch.fake.stream(stream):
        start.record()
        fsdp_fake_device.sleep(50)
        end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert end.query()
    assert 50 <= start.elapsed_time(end) < 60_000
    untimed = torch.fake.Event()
    untimed.record()
    untimed.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        untimed.elapsed_time(end)


def test_waits_of_a_stream_do_not_stop_the_host(held_back):
    side = torch.fake.Stream()
    with torch.fake.stream(side):
        torch.ones(4, device="fake")
    fsdp_fake_device.reset_counters()
    torch.fake.current_stream().wait_stream(side)
    torch.accelerator.current_stream().wait_event(side.record_event())
    assert not side.query()
    assert count_syncs() == {}
    torch.fake.current_stream().synchronize()
    assert side.query()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool((x > 0).any()), "item"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: torch.empty(4).copy_(x, non_blocking=True), "copy to pageable memory"),
        (lambda x: x.copy_(torch.zeros(4)), "copy to the device"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::nonzero"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: torch.fake.synchronize(), "device"),
        (lambda x: torch.fake.current_stream().synchronize(), "stream"),
        (lambda x: torch.fake.current_stream().record_event().synchronize(), "event"),
    ],
)
def test_waits_of_the_host_are_counted(program, kind):
    x = torch.ones(4, device="fake")
    fsdp_fake_device.reset_counters()
    program(x)
    assert count_syncs() == {kind: 1}


@pytest.mark.parametrize(
    "program",
    [
        lambda x, pinned: x.copy_(pinned, non_blocking=True),
        lambda x, pinned: pinned.copy_(x, non_blocking=True),
        lambda x, pinned: x.copy_(torch.zeros(4), non_blocking=True),
        lambda x, pinned: x.to("cpu", non_blocking=True),
        lambda x, pinned: x.to("fake:1"),
        lambda x, pinned: torch.nn.functional.dropout(x).softmax(0).sum(),
        lambda x, pinned: torch._foreach_add_([x, x], [x, x]),
    ],
)
def test_what_need_not_wait_does_not(program, held_back):
    x, pinned = torch.ones(4, device="fake"), torch.ones(4).pin_memory()
    fsdp_fake_device.reset_counters()
    program(x, pinned)
    assert count_syncs() == {}
    assert fsdp_fake_device.counters().inline_kernels == {}


def test_copies_are_counted_by_direction():
    x, pinned = torch.ones(4, device="fake"), torch.ones(4).pin_memory()
    fsdp_fake_device.reset_counters()
    x.copy_(pinned, non_blocking=True)
    x.copy_(torch.zeros(4), non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x.clone()
    copies = fsdp_fake_device.counters().copies
    assert set(copies) == {"pinned host to device", "host to device", "device to pinned host", "device to device"}
    assert all(copy == fsdp_fake_device.CopyCount(1, 16) for copy in copies.values())


def test_pageable_memory_is_read_before_the_call_returns(held_back):
    source = torch.full((8,), 3.0)
    x = source.to("fake", non_blocking=True)
    source.zero_()
    assert x.tolist() == [3.0] * 8


def test_devices_wait_for_each_other_in_copies(held_back):
    x = torch.full((8,), 3.0, device="fake:0")
    assert x.to("fake:1").tolist() == [3.0] * 8


def test_backward_uses_the_streams_of_forward(held_back):
    side, x = torch.fake.Stream(), torch.ones(4, device="fake", requires_grad=True)
    side.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(side):
        y = x * 3
    torch.fake.current_stream().wait_stream(side)
    (y * 2).sum().backward()
    assert x.grad.tolist() == [6.0] * 4


def test_data_loader_pins():
    batch = next(iter(DataLoader(torch.ones(4, 2), batch_size=4, pin_memory=True)))
    assert batch.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()


def test_negative_delay_is_refused():
    with pytest.raises(ValueError, match="Type 0 or more"):
        fsdp_fake_device.set_delay(-1)
    with pytest.raises(ValueError, match="there are 'all', 'default', 'side'"):
        fsdp_fake_device.set_delay(1, "other")


def test_streams_that_are_held_back_can_be_chosen():
    side = torch.fake.Stream()
    with fsdp_fake_device.with_delay(60_000, "default"):
        x = torch.ones(4, device="fake")
        with torch.fake.stream(side):
            torch.ones(4, device="fake")
        while not side.query():
            pass
        assert not torch.fake.current_stream().query()
    assert x.sum().item() == 4
