"""What both adapters check and translate before a run starts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

from fsdp_core.errors import StrategyUnavailableError, UnsupportedCapabilityError
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.mixed_precision import ShardPrecision

__all__ = ["check_devices", "check_state_dict_type", "check_waiting", "reduce_op_name", "set_rank_zero"]


def check_devices(
    strategy: str, backend: Backend, devices: Iterable[torch.device] | None, precision: ShardPrecision
) -> None:
    """Refuse devices that the backend doesn't run on, and dtypes that they don't compute in.

    Raises:
        StrategyUnavailableError: The accelerator is another one.
        UnsupportedCapabilityError: The device lacks the precision.
    """
    for device in list(devices or ())[:1]:
        if device.type not in backend.accelerators:
            raise StrategyUnavailableError(
                f"strategy {strategy!r} can't run on {device.type!r}, but on {' and '.join(backend.accelerators)}.\n"
                f"Write accelerator={backend.accelerators[-1]!r}, or see `fsdp list` for a strategy for this hardware."
            )
        bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        precision.check_device(device, bf16_supported=bf16)


def check_state_dict_type(state_dict_type: str) -> None:
    """Refuse what is neither ``"sharded"`` nor ``"full"``.

    Raises:
        UnsupportedCapabilityError: It is neither.
    """
    if state_dict_type not in ("sharded", "full"):
        raise UnsupportedCapabilityError(
            f"state_dict_type={state_dict_type!r} is no kind of checkpoint.\n"
            "Write 'sharded' for a folder that every rank writes its part of, or 'full' for one file."
        )


def check_waiting(timeout: timedelta | None, async_save: bool) -> None:
    """Refuse a time that is none, and an ``async_save`` that Python would only take for true.

    Raises:
        UnsupportedCapabilityError: It is so.
    """
    given: Any = timeout
    if given is not None and not (isinstance(given, timedelta) and given > timedelta()):
        seconds = given if isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0 else 1800
        raise UnsupportedCapabilityError(
            f"timeout={given!r} is no time to wait.\nWrite a datetime.timedelta, such as timedelta(seconds={seconds}), "
            "or leave it out."
        )
    if not isinstance(async_save, bool):
        raise UnsupportedCapabilityError(
            f"async_save={async_save!r} says neither yes nor no.\n"
            "Write True to write checkpoints in the background, or False to wait for them."
        )


def reduce_op_name(reduce_op: Any) -> str:
    """Name a reduction, given as Lightning gives it: a string, torch's ``ReduceOp``, or ``None`` for the mean.

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
    """Tell Lightning's helpers for messages of rank 0 which rank this is."""
    for rank_zero_only in (fabric_rank_zero_only, utilities_rank_zero_only):
        setattr(rank_zero_only, "rank", rank)  # noqa: B010  # a function with an attribute, which no type describes
