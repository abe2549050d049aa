"""What tests ask of the device and have it do, beside what torch does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from fsdp_fake_device.extension import extension


@dataclass(frozen=True)
class CopyCount:
    """Copies of one direction.

    Args:
        count: How many.
        bytes: How many bytes in all.
    """

    count: int
    bytes: int


@dataclass(frozen=True)
class Counters:
    """What the device has done since the process began, or since ``reset_counters()``.

    Args:
        kernels: How many kernels were queued, or run in the caller.
        collectives: How many collectives were queued.
        host_syncs: How often the host waited for the device, by what made it wait: ``"item"``, ``"stream"``,
            ``"event"``, ``"device"``, ``"copy to the host"``, the name of an operator such as ``"aten::nonzero"``. An
            accelerator would have waited too.
        inline_kernels: How often the host waited because this device can't queue an operator, by its name. An
            accelerator would not have.
        copies: Copies by direction, such as ``"pinned host to device"``.
    """

    kernels: int
    collectives: int
    host_syncs: Mapping[str, int]
    inline_kernels: Mapping[str, int]
    copies: Mapping[str, CopyCount]


def counters() -> Counters:
    """What the device has done so far."""
    report = dict(extension.counters())
    copies = {direction: CopyCount(*numbers) for direction, numbers in report.pop("copies").items()}
    return Counters(**report, copies=copies)


def reset_counters() -> None:
    """Count from zero."""
    extension.reset_counters()


#: Whose operations are held back: those of all streams, of each device's default stream, or of the others.
HeldStreams = Literal["all", "default", "side"]


def get_delay() -> tuple[int, HeldStreams]:
    """How many milliseconds an operation waits if nobody demands it, and on which streams."""
    milliseconds, streams = extension.delay()
    return milliseconds, streams


def set_delay(milliseconds: int, streams: HeldStreams = "all") -> None:
    """Hold back operations that are queued from now on.

    Args:
        milliseconds: How long one waits if nobody demands it, by a wait on the host or on another stream. 0 has each
            run as soon as it can.
        streams: Which streams are held back. ``"all"`` shows what is read too early. ``"default"`` also shows what is
            not to be done before the default stream, and is demanded by that alone, such as a gather of parameters
            that does not wait for the optimizer.

    Raises:
        ValueError: If it is negative, or if there are no such streams.
    """
    if milliseconds < 0:
        raise ValueError(f"set_delay({milliseconds}): operations can't run earlier than now. Type 0 or more")
    if streams not in get_args(HeldStreams):
        raise ValueError(f"set_delay(streams={streams!r}): there are {', '.join(map(repr, get_args(HeldStreams)))}")
    extension.set_delay(milliseconds, streams)


@contextmanager
def with_delay(milliseconds: int, streams: HeldStreams = "all") -> Iterator[None]:
    """Hold back what is queued in a block.

    Args:
        milliseconds: As of ``set_delay``.
        streams: Likewise.
    """
    previous = get_delay()
    set_delay(milliseconds, streams)
    try:
        yield
    finally:
        set_delay(*previous)


def set_blocking(is_blocking: bool) -> None:
    """Whether each kernel is waited for at once, so that its error is raised where it was queued.

    Args:
        is_blocking: True does what ``FSDP_FAKE_DEVICE_BLOCKING=1`` does.
    """
    extension.set_blocking(is_blocking)


def set_memory_limit(size: int, device: torch.device | int | str | None = None) -> None:
    """Limit the memory of a device. What needs more raises ``torch.OutOfMemoryError``.

    Args:
        size: Bytes that may be reserved.
        device: Which device; the current one if there is none.
    """
    from fsdp_fake_device.device_module import index_of

    extension.set_memory_limit(index_of(device), size)


#: What :func:`without` can leave out.
Part = Literal["collectives", "pinned memory", "random state", "streams"]


@contextmanager
def without(*parts: Part) -> Iterator[None]:
    """A block in which the device lacks something, as devices do whose package has not got it yet.

    Args:
        parts: What it lacks: ``"collectives"``, ``"pinned memory"``, ``"random state"``, ``"streams"`` besides the
            default one. What was made before is there still.

    Raises:
        ValueError: If it is none of these.
    """
    unknown = [part for part in parts if part not in get_args(Part)]
    if unknown:
        raise ValueError(f"without({unknown[0]!r}): can be left out are {', '.join(map(repr, get_args(Part)))}")
    registries: list[tuple[dict[str, Any], str]] = []
    if "collectives" in parts:
        registries.append((dist.Backend.default_device_backend_map, "fake"))
    if "random state" in parts:
        functions = vars(torch.get_device_module("fake"))
        registries += [(functions, name) for name in functions if "rng_state" in name]
    removed = [(registry, name, registry.pop(name)) for registry, name in registries]
    extension.set_parts("streams" not in parts, "pinned memory" not in parts)
    try:
        yield
    finally:
        extension.set_parts(True, True)
        for registry, name, value in removed:
            registry[name] = value


def sleep(milliseconds: int) -> None:
    """Queue a kernel on the current stream that does nothing for a while, as ``torch.cuda._sleep`` does.

    Args:
        milliseconds: How long.
    """
    extension.sleep(milliseconds)
