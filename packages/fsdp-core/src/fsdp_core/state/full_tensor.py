"""The whole of a tensor that ranks hold parts of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["check_not_gathered", "each_whole", "gathered_modules", "whole"]

#: Modules that :func:`fsdp_core.gathered` has given whole parameters for a while, and roots that they are parts of.
gathered_modules: WeakSet[nn.Module] = WeakSet()


def check_not_gathered(root: nn.Module, what: str) -> None:
    """Refuse what needs the shards of a root while whole parameters stand in for them.

    Args:
        root: A sharded root.
        what: What was asked for.

    Raises:
        ShardingError: They are.
    """
    if root in gathered_modules:
        raise ShardingError(
            f"{what} can't be had within fsdp_core.gathered(), where whole parameters stand in for shards.\n"
            "Leave the context before; within it, module.state_dict() has whole values on every rank."
        )


def whole(value: Any, runtime: Runtime, name: str = "a tensor") -> Any:
    """Gather a state tensor on every rank. All ranks must call it.

    Args:
        value: A DTensor, this rank's chunks, or what is the same on every rank.
        runtime: The ranks.
        name: What it is called in errors.

    Returns:
        A plain tensor; what is neither a tensor nor chunks comes back as it is.

    Raises:
        ShardingError: No rank holds some part of it.
    """
    return next(full for _, full in each_whole({name: value}, runtime))


def each_whole(values: Mapping[Any, Any], runtime: Runtime) -> Iterator[tuple[Any, Any]]:
    """Gather state tensors on every rank, one after the other. All ranks must go through all of them.

    Ranks tell each other once what they hold of all of them.

    Args:
        values: By name, in the same order on every rank, what :func:`whole` takes.
        runtime: The ranks.

    Yields:
        Each name, and what :func:`whole` returns for it.

    Raises:
        ShardingError: No rank holds some part of one.
    """
    held = {name: _held(value) for name, value in values.items() if isinstance(value, ChunkedTensor)}
    by_rank: list[dict[Any, tuple[int, list[Box]]]] = runtime.gather_objects(held) if held else []
    for name, value in values.items():
        if isinstance(value, SavedTensor):
            yield name, value.full()
        elif isinstance(value, ChunkedTensor):
            told = [of_rank[name] for of_rank in by_rank]
            _check_covered(value.shape, [boxes for replica, boxes in told if replica == 0], name)
            yield name, _from_chunks(value, [boxes for _, boxes in told], runtime)
        elif isinstance(value, Tensor):
            yield name, (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        else:
            yield name, value


def _held(value: ChunkedTensor) -> tuple[int, list[Box]]:
    """Which copy of a tensor this rank holds of, and the boxes."""
    return value.replica, [(tuple(chunk.offsets), tuple(chunk.data.shape)) for chunk in value.chunks]


def _from_chunks(value: ChunkedTensor, by_rank: Sequence[Sequence[Box]], runtime: Runtime) -> Tensor:
    """Gather equally long runs of bytes, which every library of collectives can, whatever the dtype."""
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


def _check_covered(shape: tuple[int, ...], by_rank: Sequence[Sequence[Box]], name: Any) -> None:
    """Refuse a tensor of which copy 0 is not there once: what nobody holds would be whatever was in memory."""
    fault = find_fault(shape, [box for boxes in by_rank for box in boxes if prod(box[1])])
    if fault is not None:
        raise ShardingError(
            f"{name} of shape {list(shape)} can't be gathered: {fault}, over all ranks.\n"
            "The boxes that a backend gives for copy 0 of a tensor must cover it once: report this to the authors of "
            "the strategy's package."
        )
