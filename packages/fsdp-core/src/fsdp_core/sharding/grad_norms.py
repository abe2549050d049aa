"""The norms of whole gradients of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.gradients.step_gradients import plain
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.layout import Part

__all__ = ["norms_of_gradients"]


def norms_of_gradients(sharded: Sharded, order: float) -> dict[str, Tensor]:
    """The norm of each gradient of a sharded root, the same on every rank. All ranks must call it.

    Args:
        sharded: The root; no forward pass of it may be in progress.
        order: The order *p* of the norms, positive; ``inf`` for the largest absolute value.

    Returns:
        By name of each parameter that has a gradient, a 0-dim tensor on the CPU, in fp32 or the widest parameter's
        dtype, if that is wider.
    """
    runtime = sharded.runtime
    parts = {part.name: (p, part) for p, parts_of_p in sharded.layout().items() for part in parts_of_p}
    names = [name for name in sharded.plan.parameters if name in parts]
    # a rank that holds no part of a parameter may have no gradient for it
    has_gradient, powers, is_nan = (torch.zeros(len(names), dtype=torch.float64) for _ in range(3))
    for index, name in enumerate(names):
        parameter, part = parts[name]
        if parameter.grad is not None:
            local_tensors = _local_parts(parameter.grad, part, runtime.rank)
            has_gradient[index] = 1
            norms = _norms(local_tensors, order)
            if math.isinf(order):
                powers[index] = max(norms, default=0.0)
            else:
                powers[index] = sum(norm**order for norm in norms)
            is_nan[index] = any(bool(tensor.isnan().any()) for tensor in local_tensors)
    # not in fp64 for all: not every device has it
    dtype = reduce(torch.promote_types, (p.dtype for p, _ in parts.values() if p.is_floating_point()), torch.float32)
    gathered = torch.stack([has_gradient, powers, is_nan]).to(dtype)
    reduced = runtime.all_reduce(gathered.to(runtime.device), "max" if math.isinf(order) else "sum").cpu()
    values = reduced[1] if math.isinf(order) else reduced[1] ** (1 / order)
    values = values.where(reduced[2] == 0, torch.nan)  # gloo's maximum ignores a NaN from another rank
    return {name: value for name, value, count in zip(names, values, reduced[0], strict=True) if count}


def _local_parts(gradient: Tensor, part: Part, rank: int) -> list[Tensor]:
    """The parts of a gradient that this rank counts, such that all ranks together count each element once."""
    tensor = plain(gradient)
    # on XLA slicing a tensor or reading a value runs a program, which all ranks would have to run
    value = part.of(tensor.cpu() if tensor.device.type == "xla" else tensor)
    if isinstance(value, ChunkedTensor):
        return [chunk.data for chunk in value.chunks if isinstance(chunk.data, Tensor)] if not value.replica else []
    if isinstance(value, DTensor):
        return [] if chunked(value).replica else [local_tensor(value)]
    return [] if rank else [local_tensor(value)]


def _norms(tensors: Sequence[Tensor], order: float) -> list[float]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32) if tensors else None
    return [
        float(torch.linalg.vector_norm(tensor.detach(), order, dtype=dtype)) for tensor in tensors if tensor.numel()
    ]
