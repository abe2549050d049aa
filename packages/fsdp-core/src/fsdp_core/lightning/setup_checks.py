"""What both adapters check and translate before a run starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

from fsdp_core.devices import accelerator_kind, covers, supports_bf16
from fsdp_core.errors import StrategyUnavailableError, UnsupportedCapabilityError
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.options import ShardingOptions
from fsdp_core.sharding.precision_strings import ShardPrecision

__all__ = [
    "check_devices",
    "check_save_frozen",
    "check_scattered_save",
    "check_state_dict_type",
    "check_timeout_and_async_save",
    "hang_duration",
    "reduce_op_name",
    "set_rank_zero",
]


def check_devices(
    strategy: str, backend: Backend, devices: Iterable[torch.device] | None, precision: ShardPrecision | None
) -> None:
    """Refuse devices that the backend doesn't run on, and dtypes that they don't support.

    Args:
        strategy: The strategy's name.
        backend: Its backend.
        devices: The devices of this host.
        precision: The dtypes; ``None`` to leave them unchecked, because asking a device initialises it in this process.

    Raises:
        StrategyUnavailableError: The backend does not run on this accelerator, or torch's is another one.
        UnsupportedCapabilityError: The device does not support the precision.
    """
    for device in list(devices or ())[:1]:  # all are of one type
        if not covers(backend.accelerators, device.type):
            raise StrategyUnavailableError(
                f"strategy {strategy!r} can't run on {device.type!r}, but on {' and '.join(backend.accelerators)}.\n"
                f"Write accelerator={backend.accelerators[-1]!r}, or see `fsdp list` for a strategy for this hardware."
            )
        kind = accelerator_kind()
        if kind is not None and device.type not in ("cpu", "xla", kind):
            raise StrategyUnavailableError(
                f"this run is on {device.type!r} devices, and torch's accelerator here is {kind!r}: a process has one, "
                f"and the package that registers {kind!r} comes first.\nWrite accelerator={kind!r}; or "
                "set TORCH_DEVICE_BACKEND_AUTOLOAD=0, import fsdp_core.lightning in the script, and not that package."
            )
        if precision is None:
            continue
        precision.check_device(device, bf16_supported=supports_bf16(device))


def check_state_dict_type(state_dict_type: str) -> None:
    """Refuse what is neither ``"sharded"`` nor ``"full"``.

    Raises:
        UnsupportedCapabilityError: It is neither.
    """
    if state_dict_type not in ("sharded", "full"):
        raise UnsupportedCapabilityError(
            f"state_dict_type={state_dict_type!r} is not a kind of checkpoint.\n"
            "Write 'sharded' for a folder into which every rank writes its shards, or 'full' for one file."
        )


def check_timeout_and_async_save(timeout: timedelta | None, async_save: bool) -> None:
    """Refuse a ``timeout`` that is not a positive ``timedelta``, and an ``async_save`` that is not a ``bool``.

    Raises:
        UnsupportedCapabilityError: One of them is invalid.
    """
    value: Any = timeout
    if value is not None and not (isinstance(value, timedelta) and value > timedelta()):
        seconds = value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else 1800
        raise UnsupportedCapabilityError(
            f"timeout={value!r} is not a duration.\nWrite a datetime.timedelta, such as timedelta(seconds={seconds}), "
            "or leave it out."
        )
    if not isinstance(async_save, bool):
        raise UnsupportedCapabilityError(
            f"async_save={async_save!r} is neither True nor False.\n"
            "Write True to write checkpoints in the background, or False to wait for them."
        )


#: Collectives count nanoseconds, up to 292 years; with a longer timeout, gloo waits for ever, at full speed.
_LONGEST_HANG = timedelta(days=3650)
#: Ranks wait for each other in every step, and check ten times per ``hang_timeout`` whether they still do.
_SHORTEST_HANG = timedelta(seconds=1)


def hang_duration(value: object) -> timedelta | None:
    """A ``hang_timeout`` as a duration.

    Args:
        value: A duration, or a number of seconds; ``None`` to watch nothing.

    Raises:
        UnsupportedCapabilityError: The value is neither, or below one second, or longer than torch's collectives can
            wait.

    Example:
        >>> hang_duration(90)
        datetime.timedelta(seconds=90)
    """
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        duration = timedelta(seconds=value) if is_number else value  # type: ignore[arg-type]
    except (OverflowError, ValueError):  # infinite, or not a number
        duration = None
    fault = "not a duration"
    if isinstance(duration, timedelta) and duration > timedelta():
        if _SHORTEST_HANG <= duration <= _LONGEST_HANG:
            return duration
        is_too_long = duration > _LONGEST_HANG
        fault = "longer than ranks can wait" if is_too_long else "less than a second: ranks wait in every step"
    raise UnsupportedCapabilityError(
        f"hang_timeout={value!r} is {fault}.\n"
        "Write a number of seconds, a datetime.timedelta such as timedelta(minutes=30), or None to let ranks wait."
    )


def check_scattered_save(scattered_save: bool, state_dict_type: str) -> None:
    """Refuse a ``scattered_save`` that is not a ``bool``, and ``True`` with full checkpoints, which are one file.

    Raises:
        UnsupportedCapabilityError: It is not a ``bool``, or the two can't be combined.
    """
    if not isinstance(scattered_save, bool):
        raise UnsupportedCapabilityError(
            f"scattered_save={scattered_save!r} is neither True nor False.\n"
            "Write True to let each rank save where it stands, or False to save to one folder that all ranks share."
        )
    if scattered_save and state_dict_type == "full":
        raise UnsupportedCapabilityError(
            "scattered_save=True can't be combined with state_dict_type='full': rank 0 writes one file, wherever the "
            "other ranks stand.\nLeave one of them out."
        )


def check_save_frozen(options: ShardingOptions) -> None:
    """Refuse ``save_frozen=False`` with full checkpoints, which can't name a base, and a base that is no path.

    Raises:
        UnsupportedCapabilityError: They can't be combined, or the base is no path.
    """
    for name in ("save_frozen", "save_unchanged_buffers"):
        if not getattr(options, name) and options.state_dict_type == "full":
            raise UnsupportedCapabilityError(
                f"{name}=False can't be combined with state_dict_type='full': a file of whole tensors has no place for "
                "the digests of what it leaves out.\nLeave one of them out."
            )
    base = options.frozen_base
    if base is not None and (not isinstance(base, str | os.PathLike) or not os.fspath(base)):
        raise UnsupportedCapabilityError(
            f"frozen_base={base!r} is no path.\nWrite the folder or file that the module's frozen parameters come from."
        )


def reduce_op_name(reduce_op: Any) -> str:
    """Return the name of a reduction, given as in Lightning: a string, torch's ``ReduceOp``, or ``None`` for the mean.

    Example:
        >>> reduce_op_name(None), reduce_op_name("AVG"), reduce_op_name(torch.distributed.ReduceOp.SUM)
        ('mean', 'mean', 'sum')
    """
    if reduce_op is None:
        return "mean"
    name = reduce_op.lower() if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1].lower()
    name = "mean" if name == "avg" else name
    if name not in ("mean", "sum", "max", "min"):
        raise UnsupportedCapabilityError(f"reduce_op={reduce_op!r} is not known.\nWrite 'mean', 'sum', 'max' or 'min'.")
    return name


def set_rank_zero(rank: int) -> None:
    """Set the rank in Lightning's helpers for rank-zero messages."""
    for rank_zero_only in (fabric_rank_zero_only, utilities_rank_zero_only):
        setattr(rank_zero_only, "rank", rank)  # noqa: B010  # a function with an attribute, which no type describes
