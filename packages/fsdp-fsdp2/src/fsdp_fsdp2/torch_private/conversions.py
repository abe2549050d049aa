"""Conversions of a sharded module, such as ``module.to()``, within what its units can follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.state import running_forwards

__all__ = ["allow_conversions"]


def allow_conversions(root: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Let ``to()``, ``cpu()``, ``float()`` and the like leave parameters as they are where they change nothing.

    torch exchanges a DTensor with what it was converted to, even if that is the same. It refuses to if there is a weak
    reference to it, and its message does not say what to do; strategies find the names of shards by such references.
    Inside the root's forward pass it also expects shards where units are gathered.

    Args:
        root: The root.
        units: Its units, itself included.
    """
    apply_under_root = partial(_apply, weakref.ref(root))
    for unit in units:
        vars(unit)["_apply"] = MethodType(apply_under_root, unit)
    swap: Any = torch.utils.swap_tensors
    is_replaced = isinstance(swap, partial) and swap.func is _swap_changed
    if not is_replaced:
        torch.utils.swap_tensors = partial(_swap_changed, swap)


def _apply(root_ref: weakref.ref[nn.Module], unit: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    if root_ref() in running_forwards:
        # FSDPModule's own _apply would reshard the unit; that of nn.Module asks gathered parameters, which refuse
        # what changes them.
        return super(FSDPModule, unit)._apply(fn, recurse)
    try:
        return type(unit)._apply(unit, fn, recurse)
    except RuntimeError as error:  # torch's, which says what could not be swapped, and not why
        if isinstance(error.__cause__, UnsupportedCapabilityError):
            raise error.__cause__ from None
        raise


def _swap_changed(swap: Any, t1: Tensor, t2: Tensor) -> None:
    if isinstance(t1, DTensor) and isinstance(t2, DTensor):
        if _are_same(t1, t2):
            return
        is_sharded_param = isinstance(t1, nn.Parameter) and bool(weakref.getweakrefs(t1))
        if is_sharded_param:
            raise UnsupportedCapabilityError(
                "a sharded module can't be converted to another device or dtype, as by module.to(), half() or cpu(): "
                "optimizers and checkpoints hold its shards as they are.\n"
                "Convert it before the strategy shards it, or write precision='bf16-true'. For its values elsewhere, "
                "fsdp_core.full_state_dict(module) gives them to rank 0."
            )
    swap(t1, t2)


def _are_same(a: DTensor, b: DTensor) -> bool:
    """Whether two DTensors are the same shard in the same memory."""
    local_a, local_b = a.to_local().detach(), b.to_local().detach()
    return (
        a.device_mesh == b.device_mesh
        and a.placements == b.placements
        and a.shape == b.shape
        and local_a.dtype == local_b.dtype
        and local_a.device == local_b.device
        and local_a.stride() == local_b.stride()
        and local_a.data_ptr() == local_b.data_ptr()
    )
