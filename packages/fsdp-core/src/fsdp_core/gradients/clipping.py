"""Gradient clipping over shards: the norm is that of the whole gradient, not of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.gradients.step_gradients import plain
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private.tensors import foreach_mul_, foreach_norm

__all__ = ["clip_grads_by_norm", "clip_grads_by_value", "is_sharded_dtensor", "local_tensor", "scale_gradients"]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else plain(tensor)


def clip_grads_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    runtime: Runtime,
    is_sharded: Callable[[Tensor], bool],
    group: Any | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down, in place, so that their joint norm is at most ``max_norm``.

    Sharded gradients count by their shards, summed over the ranks that hold different ones; others are taken to be the
    same on every rank and count once. All ranks must call it.

    Args:
        parameters: The parameters whose ``.grad`` to clip. Those without one are skipped.
        max_norm: The largest norm to leave.
        runtime: The world to reduce over.
        is_sharded: Whether ranks hold different parts of a parameter.
        group: The ranks that together hold a whole parameter that is no DTensor; all of them when ``None``. A DTensor's
            mesh says this of it.
        norm_type: The order *p* of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise when the norm is NaN or infinite.

    Returns:
        The norm before clipping, a 0-dim tensor of at least fp32, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite``. No gradient was changed.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is no norm. Write a positive number, or float('inf').")
    # by the groups whose ranks hold the other parts; first ``group``, since all ranks must reduce over the same groups
    shards: dict[tuple[Any, ...], list[Tensor]] = {(group,): []}
    replicated: list[Tensor] = []
    wide_dtype = torch.float32  # of what ranks send each other, also those that have no gradient
    for parameter in parameters:
        wide_dtype = torch.promote_types(wide_dtype, parameter.dtype.to_real())
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            groups = _groups(parameter, runtime, group) if is_sharded(parameter) else ()
            if groups:
                shards.setdefault(groups, []).append(gradient)
            else:
                replicated.append(gradient)
    is_inf = math.isinf(norm_type)
    total = _power_sum(replicated, norm_type, runtime.device)
    for groups, grads in shards.items():
        part = _power_sum(grads, norm_type, runtime.device).to(wide_dtype)
        for process_group in groups:
            if is_inf:
                part = _largest(runtime, part, process_group)
            else:
                part = runtime.all_reduce(part, "sum", process_group)
        total = _larger(total, part) if is_inf else total + part
    if not is_inf:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradients' total norm (order {norm_type:g}) is {total.item()}, "
            f"so they can't be clipped to {max_norm}.\n"
            "Lower the learning rate or look for the NaN with torch.autograd.set_detect_anomaly(True); "
            "to clip regardless, pass error_if_nonfinite=False."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    scale_gradients([*replicated, *chain.from_iterable(shards.values())], factor)
    return total


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a number, in place.

    Args:
        gradients: This rank's gradients, or its shards of them.
        factor: A 0-dim tensor, the same on every rank.
    """
    for (device, _), grads in _group_by_dtype([local_tensor(gradient) for gradient in gradients]).items():
        foreach_mul_(grads, factor.to(device))


def clip_grads_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Limit each element of the gradients to ``[-clip_value, clip_value]``, in place. Needs no communication.

    Raises:
        UnsupportedCapabilityError: A parameter is complex, of which no element lies in an interval.
    """
    parameters = list(parameters)
    if any(parameter.is_complex() for parameter in parameters):
        raise UnsupportedCapabilityError(
            "gradients of complex parameters can't be clipped by value: complex numbers have no order.\n"
            "Write gradient_clip_algorithm='norm', or max_norm= instead of clip_val= in fabric.clip_gradients()."
        )
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).clamp_(-clip_value, clip_value)


def is_sharded_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor of which ranks hold different parts."""
    return isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements)


def _groups(parameter: Tensor, runtime: Runtime, group: Any | None) -> tuple[Any, ...]:
    """The process groups over which ranks hold different parts of a parameter; none if they hold it whole."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.shape == (runtime.world_size,):
        return (group,)
    mesh = parameter.device_mesh
    sharded_axes = [axis for axis, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    return tuple(mesh.get_group(axis) for axis in sharded_axes if mesh.size(axis) > 1)


def _largest(runtime: Runtime, value: Tensor, group: Any | None) -> Tensor:
    """The largest of all ranks' values; NaN if any is NaN, which the maximum of gloo or XLA may leave out."""
    maxima = runtime.all_reduce(torch.stack([value, value.isnan().to(value.dtype)]), "max", group)
    return maxima[0].where(maxima[1] == 0, torch.nan)


def _larger(first: Tensor, second: Tensor) -> Tensor:
    """The larger of two numbers; NaN if one is NaN, which XLA's maximum on CPUs leaves out."""
    return second.where((second > first) | second.isnan(), first)


def _group_by_dtype(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _power_sum(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |x|^p over all elements (their largest |x| for an infinite p), in fp32 or wider, on ``device``."""
    total = torch.zeros((), device=device)
    is_nan = torch.zeros((), dtype=torch.bool, device=device)
    for grads in _group_by_dtype(tensors).values():
        grads = [grad.abs() if grad.is_complex() else grad for grad in grads]
        norms = torch.stack(foreach_norm(grads, norm_type)).to(device)
        if math.isinf(norm_type):
            total = _larger(total, norms.max())
            is_nan = is_nan | torch.stack([grad.isnan().any() for grad in grads]).any().to(device)
        else:
            total = total + (norms**norm_type).sum()
    return total.where(~is_nan, torch.nan) if math.isinf(norm_type) else total
