"""Programs with one fault each. What is held back shows it, and the program without it is right."""

from __future__ import annotations

import threading

import pytest
import torch

import fsdp_fake_device
from fake_ranks import run_ranks

ELEMENTS = 1024


def ones() -> torch.Tensor:
    tensor = torch.ones(ELEMENTS, device="fake")
    torch.fake.synchronize()
    return tensor


def fresh(device: str = "fake") -> torch.Tensor:
    return torch.empty(ELEMENTS, device=device)


def result_of_other_stream(is_right: bool) -> torch.Tensor:
    side, x = torch.fake.Stream(), ones()
    with torch.fake.stream(side):
        y = x * 2
    if is_right:
        torch.fake.current_stream().wait_stream(side)
    y.record_stream(torch.fake.current_stream())
    return y + 1


def input_of_other_stream(is_right: bool) -> torch.Tensor:
    side = torch.fake.Stream()
    x = torch.full((ELEMENTS,), 2.0, device="fake")
    if is_right:
        side.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(side):
        y = x + 1
    side.synchronize()
    return y


def event_recorded_before_the_kernel(is_right: bool) -> torch.Tensor:
    side, event, y = torch.fake.Stream(), torch.fake.Event(), fresh()
    with torch.fake.stream(side):
        if not is_right:
            event.record()
        y.fill_(2)
        if is_right:
            event.record()
    torch.fake.current_stream().wait_event(event)
    return y + 1


def wait_on_another_stream(is_right: bool) -> torch.Tensor:
    side, other, y = torch.fake.Stream(), torch.fake.Stream(), fresh()
    with torch.fake.stream(side):
        y.fill_(2)
    torch.fake.current_stream().wait_stream(side if is_right else other)
    return y + 1


def overwritten_while_it_is_read(is_right: bool) -> torch.Tensor:
    side, x, y = torch.fake.Stream(), ones().mul_(2), fresh()
    torch.fake.synchronize()
    with torch.fake.stream(side):
        torch.add(x, 1, out=y)
    if is_right:
        torch.fake.current_stream().wait_stream(side)
    x.zero_()
    torch.fake.current_stream().synchronize()
    side.synchronize()
    return y


def freed_without_record_stream(is_right: bool) -> torch.Tensor:
    side, y = torch.fake.Stream(), fresh()
    x = torch.full((ELEMENTS,), 2.0, device="fake")
    side.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(side):
        torch.add(x, 1, out=y)
    if is_right:
        x.record_stream(side)
    del x
    reused = torch.zeros(ELEMENTS, device="fake")
    reused.sum().item()
    side.synchronize()
    return y


def freed_while_it_is_gathered(is_right: bool) -> torch.Tensor:
    """As storages of gathered parameters are: the storage is resized to nothing while another stream reads."""
    side, y = torch.fake.Stream(), fresh()
    x = ones().mul_(2)
    side.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(side):
        torch.add(x, 1, out=y)
    if is_right:
        torch.fake.current_stream().wait_stream(side)
    x.untyped_storage().resize_(0)
    torch.zeros(ELEMENTS, device="fake").sum().item()
    side.synchronize()
    return y


def copy_to_the_host_read_too_early(is_right: bool) -> torch.Tensor:
    x = torch.full((ELEMENTS,), 3.0, device="fake")
    host = torch.zeros(ELEMENTS, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if is_right:
        torch.fake.current_stream().synchronize()
    return host.clone()


def to_the_cpu_read_too_early(is_right: bool) -> torch.Tensor:
    host = torch.full((ELEMENTS,), 3.0, device="fake").to("cpu", non_blocking=True)
    if is_right:
        torch.fake.synchronize()
    return host.clone()


def pinned_buffer_used_again_too_early(is_right: bool) -> torch.Tensor:
    buffer = torch.full((ELEMENTS,), 3.0).pin_memory()
    event = torch.fake.Event()
    x = buffer.to("fake", non_blocking=True)
    event.record()
    if is_right:
        event.synchronize()
    buffer.fill_(7)
    return x


def batch_copied_on_a_side_stream(is_right: bool) -> torch.Tensor:
    side = torch.fake.Stream()
    host = torch.full((ELEMENTS,), 2.0).pin_memory()
    with torch.fake.stream(side):
        batch = host.to("fake", non_blocking=True)
    if is_right:
        torch.fake.current_stream().wait_stream(side)
        batch.record_stream(torch.fake.current_stream())
    return batch + 1


def stream_of_another_thread(is_right: bool) -> torch.Tensor:
    """The current stream is a thread's own."""
    side, y = torch.fake.Stream(), fresh()
    torch.fake.synchronize()

    def fill() -> None:
        if is_right:
            with torch.fake.stream(side):
                y.fill_(3)
        else:
            y.fill_(3)

    with torch.fake.stream(side):
        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()
        copy = y.clone()
    side.synchronize()
    return copy


def step_while_parameters_are_gathered(is_right: bool) -> torch.Tensor:
    gathering, shard, full = torch.fake.Stream(), ones(), fresh()
    shard.mul_(3)  # an optimizer's step
    if is_right:
        gathering.wait_stream(torch.fake.current_stream())
    with torch.fake.stream(gathering):
        full.copy_(shard)
    gathering.synchronize()
    return full


def memory_that_is_never_written(is_right: bool) -> torch.Tensor:
    x = fresh()
    if is_right:
        x.zero_()
    return x + 3


PROGRAMS = [
    result_of_other_stream,
    input_of_other_stream,
    event_recorded_before_the_kernel,
    wait_on_another_stream,
    overwritten_while_it_is_read,
    freed_without_record_stream,
    freed_while_it_is_gathered,
    copy_to_the_host_read_too_early,
    to_the_cpu_read_too_early,
    pinned_buffer_used_again_too_early,
    batch_copied_on_a_side_stream,
    stream_of_another_thread,
    step_while_parameters_are_gathered,
    memory_that_is_never_written,
]


def is_three(tensor: torch.Tensor) -> bool:
    return bool((tensor.cpu() == 3).all())


@pytest.mark.parametrize("program", PROGRAMS)
def test_fault_is_seen(program, held_back):
    assert not is_three(program(is_right=False))


@pytest.mark.parametrize("delay", [0, 60_000])
@pytest.mark.parametrize("program", PROGRAMS)
def test_right_program_is_right(program, delay):
    with fsdp_fake_device.with_delay(delay):
        assert is_three(program(is_right=True))


def test_numbers_of_another_device_are_others():
    """One generator per device: a seed of fake:0 says nothing of what fake:1 draws."""
    torch.fake.set_device(0)
    torch.manual_seed(1)
    on_1 = torch.rand(8, device="fake:1")
    torch.fake.manual_seed(1)  # of fake:0 alone
    again = torch.rand(8, device="fake:1")
    assert not torch.equal(on_1.cpu(), again.cpu())
    torch.fake.set_device(1)
    torch.fake.manual_seed(1)
    assert torch.equal(on_1.cpu(), torch.rand(8, device="fake:1").cpu())


def test_pinned_memory_is_not_used_again_while_a_copy_reads_it(held_back):
    pinned = torch.full((ELEMENTS,), 3.0).pin_memory()
    x = pinned.to("fake", non_blocking=True)
    del pinned
    other = torch.full((ELEMENTS,), 7.0).pin_memory()
    assert is_three(x)
    assert other[0] == 7


def test_what_nobody_demands_runs_after_the_delay():
    with fsdp_fake_device.with_delay(50):
        host = torch.full((8,), 3.0, device="fake").to("cpu", non_blocking=True)
        event = torch.fake.Event()
        event.record()
        assert not event.query()
        while not event.query():
            pass
    assert is_three(host)


def run_collectives(rank: int, size: int) -> dict[str, bool]:
    """Whether each program of collectives gives three: right, and with its fault."""
    import torch.distributed as dist

    fsdp_fake_device.set_delay(5_000)
    device = torch.device("fake", rank)

    def prepare(value: float) -> torch.Tensor:
        x = torch.full((ELEMENTS,), value, device=device)
        torch.fake.synchronize()
        return x

    def read_without_wait(is_right: bool) -> torch.Tensor:
        x = prepare(rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        if is_right:
            work.wait()
        y = x.clone()
        torch.fake.current_stream().synchronize()
        work.wait()
        return y

    def overwritten_before_wait(is_right: bool) -> torch.Tensor:
        x, full = prepare(3.0), torch.empty(size * ELEMENTS, device=device)
        work = dist.all_gather_into_tensor(full, x, async_op=True)
        if is_right:
            work.wait()
        x.zero_()
        torch.fake.current_stream().synchronize()
        work.wait()
        return full

    def gradient_reduced_on_the_wrong_stream(is_right: bool) -> torch.Tensor:
        reducing = torch.fake.Stream()
        gradient = prepare(0.0)
        gradient.add_(rank + 1)  # the backward pass, on the current stream
        if is_right:
            reducing.wait_stream(torch.fake.current_stream())
        with torch.fake.stream(reducing):
            dist.all_reduce(gradient)
        reducing.synchronize()
        return gradient.clone()

    def gathered_memory_freed_on_the_wrong_stream(is_right: bool) -> torch.Tensor:
        """The input of a synchronous collective belongs to the stream that it was allocated on."""
        gathering, full = torch.fake.Stream(), torch.empty(size * ELEMENTS, device=device)
        x = torch.full((ELEMENTS,), 3.0, device=device)
        gathering.wait_stream(torch.fake.current_stream())
        with torch.fake.stream(gathering):
            dist.all_gather_into_tensor(full, x)
        if is_right:
            x.record_stream(gathering)
        del x
        torch.zeros(ELEMENTS, device=device).sum().item()
        gathering.synchronize()
        return full

    programs = (
        read_without_wait,
        overwritten_before_wait,
        gradient_reduced_on_the_wrong_stream,
        gathered_memory_freed_on_the_wrong_stream,
    )
    return {
        f"{program.__name__}, {is_right}": is_three(program(is_right))
        for program in programs
        for is_right in (True, False)
    }


def test_faults_of_collectives_are_seen():
    for results in run_ranks(run_collectives):
        assert results == {name: name.endswith("True") for name in results}
