"""What this project asks of devices, by the names that torch has for all kinds of them.

With :mod:`fsdp_core.device_names` the only module of core that knows kinds of devices by name. A kind is the ``type``
of a ``torch.device``: ``"cpu"``, the one that :mod:`torch.accelerator` finds (CUDA, XPU, MPS, MTIA, or what a package
has registered as PrivateUse1, such as ``"npu"``), or ``"xla"``, which is torch_xla's own.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from inspect import signature
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.device_names import ANY_ACCELERATOR, KINDS_OF_LIGHTNING, LIGHTNINGS_OWN
from fsdp_core.errors import StrategyUnavailableError, warn

__all__ = [
    "CONVERSIONS",
    "IS_OF_KIND",
    "accelerator_kind",
    "build_facts",
    "can_pin_memory",
    "check_parts",
    "covers",
    "current_device",
    "device_facts",
    "device_model",
    "group_facts",
    "group_for",
    "has_addresses",
    "has_float64",
    "is_accelerator",
    "is_initialized",
    "kind_of",
    "peak_bytes",
    "process_group_backend",
    "random_state",
    "record_event",
    "seed",
    "select",
    "set_random_state",
    "supports_bf16",
]

#: Kinds of tensors whose memory has no addresses, and which :mod:`torch.accelerator` does not know.
_WITHOUT_ADDRESSES = frozenset({"meta", "xla", "lazy"})

#: Methods of a tensor that copy it to a kind of device; a package that registers a kind adds one for it.
CONVERSIONS = frozenset({"cpu", "cuda", "xpu", "hpu", "ipu", str(torch.accelerator.current_accelerator() or "cpu")})

#: What torch and optimizers ask of a tensor to learn of which kind it is.
IS_OF_KIND = tuple(
    name
    for name in dir(Tensor)
    if name.startswith("is_")
    and isinstance(getattr(Tensor, name), GetSetDescriptorType | property)
    and name not in ("is_leaf", "is_nested")
)


def accelerator_kind() -> str | None:
    """The kind of device that torch was built for or that a package has registered; ``None`` for the CPU alone.

    It is not initialised by that, and there may be none on this machine.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is one of :mod:`torch.accelerator`'s: its work is queued on streams, beside the host's.

    Example:
        >>> is_accelerator(torch.device("cpu"))
        False
    """
    return device.type != "cpu" and device.type == accelerator_kind()


def covers(accelerators: Collection[str], kind: str) -> bool:
    """Whether a list of kinds of devices, in which ``"any"`` may stand, has a kind.

    Example:
        >>> covers(("any", "cpu"), "npu"), covers(("any", "cpu"), "mps"), covers(("cpu",), "npu")
        (True, False, False)
    """
    # no process group communicates MPS's tensors
    is_any = kind not in ("cpu", "mps") and kind not in _WITHOUT_ADDRESSES
    return kind in accelerators or (ANY_ACCELERATOR in accelerators and is_any)


def kind_of(accelerator: str) -> str | None:
    """The kind of device of one of Lightning's accelerators; ``None`` for a name that is not Lightning's own.

    Example:
        >>> kind_of("gpu"), kind_of("tpu"), kind_of("npu")
        ('cuda', 'xla', None)
    """
    return KINDS_OF_LIGHTNING.get(accelerator, ANY_ACCELERATOR if accelerator == ANY_ACCELERATOR else None)


def has_addresses(tensor: Tensor) -> bool:
    """Whether a tensor's memory has an address: it is neither on the meta device nor computed lazily, as XLA's."""
    return tensor.device.type not in _WITHOUT_ADDRESSES


def select(device: torch.device) -> None:
    """Make an accelerator's device the current one of this thread, and initialise it.

    torch's device meshes select the device of the local rank's number where a process has not initialised any, also if
    the user has named another: ``devices=[1]``.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index or 0)
        if not is_initialized(device.type):
            torch.empty(1, device=device)


def check_parts(device: torch.device) -> None:
    """Refuse an accelerator whose package lacks what each run needs, before torch misses it in the middle of a step.

    Args:
        device: The device, which is the current one. Those of Lightning's own accelerators lack nothing.

    Raises:
        StrategyUnavailableError: It has no streams, or its random-number generator has no state to be read.
    """
    if not is_accelerator(device) or device.type in LIGHTNINGS_OWN:
        return
    for api, purpose, use in (
        ("torch.Stream(device)", "gathers and reductions run on streams beside computation", _use_stream),
        (f"torch.{device.type}.get_rng_state(device)", "dropout and exact resumes need it", random_state),
    ):
        try:
            use(device)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            raise StrategyUnavailableError(
                f"{device} has no {api}, and {purpose}: {_first_line(error)}\n"
                f"Install a release of the package for {device.type!r} that has it, or write accelerator='cpu'. "
                f"`fsdp doctor --device {device.type}` tries all that a device must provide."
            ) from error


def _use_stream(device: torch.device) -> None:
    torch.Stream(device).wait_event(record_event(device))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_initialized(kind: str) -> bool:
    """Whether this process uses a kind of accelerator already. A device module that can't tell has been imported."""
    module = torch.get_device_module(kind)
    return bool(getattr(module, "is_initialized", lambda: True)())


def current_device(*, initialize: bool = False) -> torch.device:
    """The accelerator's current device if this process uses the accelerator already, else the CPU.

    Args:
        initialize: Whether to use it from now on, if there is one.
    """
    kind = accelerator_kind()
    if kind is None or not torch.accelerator.is_available() or not (initialize or is_initialized(kind)):
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def process_group_backend(kind: str) -> str:
    """The backends of a process group for a kind of device, which communicates tensors of the host too.

    Args:
        kind: The kind, such as ``"cpu"``.

    Returns:
        What :func:`torch.distributed.init_process_group` takes: ``"gloo"`` for the CPU, and such as
        ``"cpu:gloo,npu:hccl"`` for an accelerator, because ranks agree on small things in host memory.

    Raises:
        StrategyUnavailableError: No backend is registered for this kind of device.

    Example:
        >>> process_group_backend("cpu")
        'gloo'
    """
    if kind == "cpu":
        return "gloo"
    if kind not in dist.Backend.default_device_backend_map:
        raise StrategyUnavailableError(
            f"ranks on {kind!r} can't communicate: no process-group backend is registered with torch for this kind of "
            f"device.\nImport the package that registers one with torch.distributed.Backend.register_backend(..., "
            f"devices=[{kind!r}]), or write accelerator='cpu'. `fsdp doctor --device {kind}` lists what a device needs."
        )
    return group_for(kind)


def group_for(kind: str) -> str:
    """A process group for a kind of device, as users write it; with dots where no backend is registered for it."""
    if kind == "cpu":
        return "cpu:gloo"
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map.get(kind, '...')}"


def supports_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16 by itself. Initialises it. Where its module can't be asked, it is tried."""
    if not is_accelerator(device):
        return True
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is None:
        return _computes_in(torch.bfloat16, device)
    has_choice = "including_emulation" in signature(is_supported).parameters  # torch.cuda's, torch.xpu's, torch.npu's
    return bool(is_supported(including_emulation=False) if has_choice else is_supported())


@cache
def has_float64(kind: str) -> bool:
    """Whether a kind of accelerator computes in float64; some XPUs and MPS, for example, do not. Initialises it."""
    return kind != accelerator_kind() or _computes_in(torch.float64, torch.device(kind))


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies matrices of a dtype."""
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        return float((ones @ ones).sum()) == 8.0
    except (RuntimeError, TypeError, NotImplementedError):
        return False


@cache
def can_pin_memory(kind: str) -> bool:
    """Whether torch can allocate host memory that a kind of accelerator copies from and to beside the host's work.

    Warns where an accelerator can't.

    Raises:
        RuntimeError: The host has no memory, or the device has failed in what was queued on it before.
    """
    if kind != accelerator_kind() or not torch.accelerator.is_available():
        return False
    try:
        reason = "" if torch.empty(1, pin_memory=True).is_pinned() else "is_pinned() is False"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, NotImplementedError) as error:
        torch.accelerator.synchronize()  # raises a failure of the device, which an allocation may report in its place
        reason = _first_line(error)
    if reason:
        warn(
            f"torch.empty(..., pin_memory=True) gives no host memory that {kind!r} devices copy from beside the host's "
            f"work ({reason}): each copy for offload and for checkpoints is waited for.\nNothing needs to be changed. "
            f"`fsdp doctor --device {kind}` says what the package for the device must provide."
        )
    return not reason


def record_event(device: torch.device) -> torch.Event:
    """An event that is complete when a device has done all that was queued on its current stream until now."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def seed(device: torch.device, value: int) -> None:
    """Seed the random-number generator of an accelerator's current device."""
    torch.get_device_module(device).manual_seed(value)


def random_state(device: torch.device) -> Tensor:
    """The state of a device's random-number generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    # torch_tpu refuses its own module's function where torch has this one, from torch 2.14 on
    accelerator_random = getattr(torch.accelerator, "random", None)
    if accelerator_random is not None and is_accelerator(device):
        state: Tensor = accelerator_random.get_rng_state(device)
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's random-number generator to one of :func:`random_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def build_facts() -> dict[str, Any]:
    """The accelerators that torch was built for, with the releases of the libraries that it was built with."""
    nccl = torch.cuda.nccl.version() if dist.is_available() and dist.is_nccl_available() else ()
    libraries = {"nccl": ".".join(map(str, nccl))} if nccl else {}
    return {"cuda_build": torch.version.cuda, "hip_build": torch.version.hip, "libraries": libraries}


def group_facts() -> dict[str, bool]:
    """The process-group backends that torch knows, and those of other packages: whether each is here."""
    if not dist.is_available():
        return {}
    known = {}
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        ask = getattr(dist, f"is_{name}_available", None)
        known[name] = ask is not None and bool(ask())
    registered = map(str, getattr(dist.Backend, "backend_list", ()))
    return known | {name: True for name in registered if name not in known and name != "undefined"}


def device_facts() -> list[dict[str, Any]]:
    """What the accelerator's devices on this machine say of themselves; empty where there are none. Initialises them.

    Returns:
        For each device its ``name`` (such as ``"npu:0"``), ``model``, ``memory`` in bytes and ``capability``; ``None``
        for what the device module does not tell.
    """
    kind = accelerator_kind()
    if kind is None or not torch.accelerator.is_available():
        return []
    facts = []
    for index in range(torch.accelerator.device_count()):
        properties = _device_properties(kind, index)
        major, minor = (getattr(properties, part, None) for part in ("major", "minor"))
        facts.append(
            {
                "name": f"{kind}:{index}",
                "model": device_model(kind, index),
                "memory": getattr(properties, "total_memory", None),
                "capability": None if major is None else f"{major}.{minor}",
            }
        )
    return facts


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes of tensors that a device has held at once for this process; ``None`` where it does not count them.

    Args:
        device: The device.
    """
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.memory.max_memory_allocated(device))
    except RuntimeError:  # its allocator does not count
        return None


def device_model(kind: str, index: int) -> str | None:
    """What an accelerator's device says that it is, such as ``"Ascend910B3"``; ``None`` if it does not tell."""
    ask: Any = getattr(torch.get_device_module(kind), "get_device_name", lambda _: None)
    name: str | None = getattr(_device_properties(kind, index), "name", None) or ask(index)
    return name


def _device_properties(kind: str, index: int) -> Any:
    ask: Any = getattr(torch.get_device_module(kind), "get_device_properties", lambda _: None)
    return ask(index)
