"""``torch.fake``: what torch, FSDP, DTensor and Lightning ask of a device's module, as ``torch.cuda`` answers it."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_fake_device import torch_private
from fsdp_fake_device.extension import extension

DeviceLike = torch.device | int | str | None


def index_of(device: DeviceLike) -> int:
    """The number of a device; of the current one if it has none."""
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "fake":
            raise ValueError(f"expected a fake device, and got {device}")
        if device.index is not None:
            return device.index
    return int(extension.current_device())


class Stream:
    """A stream of a device; as a context manager, it is the current one.

    What it makes is a ``torch.Stream``: methods of torch refuse subclasses.

    Args:
        device: Its device.
        priority: Below 0, one of the streams of high priority.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **identity: int) -> torch.Stream:  # type: ignore[misc]
        if identity:  # an existing one: stream_id, device_index, device_type
            return torch.Stream(**identity)
        return torch.Stream(device=torch.device("fake", index_of(device)), priority=priority)


class Event:
    """An event of the device; what it makes is a ``torch.Event``.

    Args:
        enable_timing: Whether ``elapsed_time`` can be asked.
        blocking: As of ``torch.cuda.Event``.
        interprocess: Likewise; only False can be had.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        if interprocess:
            raise ValueError("torch.fake.Event(interprocess=True): events of the fake device stay in their process")
        return torch.Event(device="fake", enable_timing=enable_timing, blocking=blocking)


class device:
    """Makes a device the current one within a block.

    Args:
        device: Which.
    """

    def __init__(self, device: DeviceLike) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.prev_idx)


class StreamContext:
    """Makes a stream the current one within a block, and its device the current one.

    Args:
        stream: Which; None changes nothing.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._previous_device = current_device()
            self._previous = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._previous)
            set_device(self._previous_device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Make a stream the current one within a block."""
    return StreamContext(stream)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """The stream that this thread queues on."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """The stream that threads queue on at first."""
    return torch_private.make_stream(index_of(device), stream_id=0)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one."""
    torch.accelerator.set_stream(stream)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all streams of a device."""
    torch.accelerator.synchronize(index_of(device))


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # activation checkpointing keeps the state of random numbers where this is true
        return is_initialized()
    raise AttributeError(f"module 'torch.fake' has no attribute {name!r}")


def init() -> None:
    """Nothing: it is initialized by its first use."""


_lazy_init = init


def is_available() -> bool:
    """Always."""
    return True


def is_initialized() -> bool:
    """Whether this process has used the device."""
    return bool(extension.is_used()) and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(extension.is_in_bad_fork())


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Always."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast can be asked for."""
    return [torch.bfloat16, torch.float16]


def device_count() -> int:
    """How many devices there are."""
    return int(extension.device_count())


def current_device() -> int:
    """The number of the current device."""
    return int(extension.current_device())


def set_device(device: DeviceLike) -> None:
    """Make a device the current one of this thread; a negative number changes nothing."""
    if (index := index_of(device)) >= 0:
        extension.set_device(index)


def get_device_name(device: DeviceLike = None) -> str:
    """What it is called."""
    return "fake device"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """A version, as CUDA's devices have."""
    return (9, 0)


def get_device_properties(device: DeviceLike = None) -> types.SimpleNamespace:
    """Its name and memory."""
    return types.SimpleNamespace(name=get_device_name(device), total_memory=int(extension.total_memory()))


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Always: it is the same memory."""
    return True


# ---------------------------------------------------------------- random numbers


def _generator(device: DeviceLike) -> torch.Generator:
    generator: torch.Generator = extension.default_generator(index_of(device))
    return generator


def default_generators() -> tuple[torch.Generator, ...]:
    """The generator of each device."""
    return tuple(_generator(index) for index in range(device_count()))


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    for generator in default_generators():
        generator.manual_seed(seed)


def seed() -> int:
    """Seed the current device by chance."""
    return _generator(None).seed()


def seed_all() -> None:
    """Seed all devices alike, by chance."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """What the current device was seeded with."""
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Seed and offset, in 16 bytes."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Go on from a state."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of each device."""
    return [generator.get_state() for generator in default_generators()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Go on from the states of all devices."""
    for generator, state in zip(default_generators(), new_states, strict=False):
        generator.set_state(state)


# ---------------------------------------------------------------- memory


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Each count, by the names that CUDA's allocator uses."""
    return dict(torch.accelerator.memory_stats(index_of(device)))


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes of tensors, each rounded up to 512."""
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most that they were."""
    return torch.accelerator.max_memory_allocated(index_of(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes of tensors, and of freed ones that are kept to be used again."""
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most that they were."""
    return torch.accelerator.max_memory_reserved(index_of(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Count peaks from now on."""
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Count totals from now on."""
    torch.accelerator.reset_accumulated_memory_stats(index_of(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Bytes that are free, and all."""
    free, total = extension.memory_info(index_of(device))
    return free, total


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """The counts, one a line."""
    return "\n".join(f"{name}: {count}" for name, count in memory_stats(device).items() if count or not abbreviated)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit a device's memory to a part of all.

    Args:
        fraction: Between 0 and 1.
        device: Which device.

    Raises:
        ValueError: If it is not between them.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    extension.set_memory_limit(index_of(device), int(fraction * extension.total_memory()))


def empty_cache() -> None:
    """Give back what is kept to be used again."""
    torch.accelerator.empty_cache()
