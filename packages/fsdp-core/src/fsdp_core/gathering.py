"""The whole of a tensor that ranks hold parts of."""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import ChunkedTensor, SavedTensor
from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = ["check_not_gathered", "gathered_modules", "whole"]

#: Modules that :func:`fsdp_core.gathered` has given whole parameters for a while, and roots that they are parts of.
gathered_modules: WeakSet[nn.Module] = WeakSet()


def check_not_gathered(root: nn.Module, what: str) -> None:
    """Refuse what needs the shards of a root while whole parameters are in the place of them.

    Args:
        root: A sharded root.
        what: What was asked for.

    Raises:
        ShardingError: They are.
    """
    if root in gathered_modules:
        raise ShardingError(
            f"{what} can't be had within fsdp_core.gathered(), where whole parameters are in the place of shards.\n"
            "Leave the context before; within it, module.state_dict() has whole values on every rank."
        )


def whole(value: Any, runtime: Runtime) -> Any:
    """Gather a state tensor on every rank. All ranks must call it.

    Args:
        value: A DTensor, this rank's chunks, or what is the same on every rank.
        runtime: The ranks.

    Returns:
        A plain tensor; what is neither a tensor nor chunks comes back as it is.
    """
    if isinstance(value, SavedTensor):
        return value.full()
    if isinstance(value, ChunkedTensor):
        return _from_chunks(value, runtime)
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    return value


def _from_chunks(value: ChunkedTensor, runtime: Runtime) -> Tensor:
    """Gather equally long runs of bytes, which every library of collectives can, whatever the dtype."""
    held = [(chunk.offsets, tuple(chunk.data.shape)) for chunk in value.chunks]
    by_rank = runtime.gather_objects(held)
    longest = max(sum(prod(box) for _, box in boxes) for boxes in by_rank)
    if not longest:
        return torch.empty(value.shape, dtype=value.dtype, device=runtime.device)
    flat = torch.zeros(longest, dtype=value.dtype, device=runtime.device)
    at = 0
    for chunk in value.chunks:
        assert isinstance(chunk.data, Tensor)  # what a rank holds of a model is in memory
        flat[at : at + chunk.data.numel()] = chunk.data.reshape(-1)
        at += chunk.data.numel()
    gathered = runtime.all_gather(flat.view(torch.uint8)).view(value.dtype)
    result = torch.empty(value.shape, dtype=value.dtype, device=runtime.device)
    for boxes, run in zip(by_rank, gathered, strict=True):
        at = 0
        for offsets, box in boxes:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))
            result[place] = run[at : at + prod(box)].view(box)
            at += prod(box)
    return result
