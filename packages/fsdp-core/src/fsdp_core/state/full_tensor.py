"""Gathers full tensors from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.state.saved_tensor import SavedTensor
from fsdp_core.torch_private.dtensors import StridedShard

__all__ = ["check_covered", "check_not_gathered", "gather_each", "gather_full", "gathered_modules", "running_forwards"]

#: Modules whose parameters :func:`fsdp_core.gathered` has temporarily replaced with full ones, and their roots.
gathered_modules: WeakSet[nn.Module] = WeakSet()

#: The number of running forward passes, by root and by the user's module in it.
running_forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def check_not_gathered(root: nn.Module, operation: str) -> None:
    """Refuse an operation on the shards of a root while full parameters replace them.

    Args:
        root: A sharded root.
        operation: The operation, for the error.

    Raises:
        ShardingError: Full parameters replace the shards of ``root``.
    """
    if root in gathered_modules:
        raise ShardingError(
            f"{operation} is not available inside fsdp_core.gathered(), where full parameters replace the shards.\n"
            "Exit the context first; inside it, module.state_dict() returns full values on every rank."
        )


def gather_full(value: Any, runtime: Runtime, name: str = "a tensor") -> Any:
    """Gather a state tensor on every rank. All ranks must call it.

    Args:
        value: A DTensor, this rank's chunks, or a value that is the same on every rank.
        runtime: The ranks.
        name: The name of the tensor in errors.

    Returns:
        A plain tensor; a value that is neither a tensor nor chunks is returned unchanged.

    Raises:
        ShardingError: Some part of it is held by no rank.
    """
    return next(full for _, full in gather_each({name: value}, runtime))


def gather_each(values: Mapping[Any, Any], runtime: Runtime) -> Iterator[tuple[Any, Any]]:
    """Gather state tensors on every rank, one after the other. All ranks must consume the whole iterator.

    The ranks exchange once which boxes they hold of all tensors.

    Args:
        values: Values as :func:`gather_full` takes them, by name, in the same order on every rank.
        runtime: The ranks.

    Yields:
        Each name, and the value that :func:`gather_full` returns for it.

    Raises:
        ShardingError: Some part of a tensor is held by no rank.
    """
    values = {name: chunked(value) if _is_strided(value) else value for name, value in values.items()}
    own_boxes = {name: _own_boxes(value) for name, value in values.items() if isinstance(value, ChunkedTensor)}
    boxes_by_rank: list[dict[Any, tuple[int, list[Box]]]] = runtime.gather_objects(own_boxes) if own_boxes else []
    for name, value in values.items():
        if isinstance(value, SavedTensor):
            yield name, value.full()
        elif isinstance(value, ChunkedTensor):
            replicas_and_boxes = [boxes_by_name[name] for boxes_by_name in boxes_by_rank]
            check_covered(value.shape, [boxes for replica, boxes in replicas_and_boxes if replica == 0], name)
            yield name, _gather_chunks(value, [boxes for _, boxes in replicas_and_boxes], runtime)
        elif isinstance(value, Tensor):
            yield name, (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        else:
            yield name, value


def _is_strided(value: Any) -> bool:
    """Whether a value is a DTensor that torch gathers correctly only if all pieces have the same size."""
    return isinstance(value, DTensor) and any(type(placement) is StridedShard for placement in value.placements)


def _own_boxes(value: ChunkedTensor) -> tuple[int, list[Box]]:
    """Return which copy of a tensor this rank's boxes belong to, and the boxes."""
    return value.replica, [(tuple(chunk.offsets), tuple(chunk.data.shape)) for chunk in value.chunks]


def _gather_chunks(value: ChunkedTensor, boxes_by_rank: Sequence[Sequence[Box]], runtime: Runtime) -> Tensor:
    """Gather a tensor from chunks. Ranks exchange equally long runs of bytes, which every library supports."""
    max_elements = max(sum(prod(box) for _, box in boxes) for boxes in boxes_by_rank)
    if not max_elements:
        return torch.empty(value.shape, dtype=value.dtype, device=runtime.device)
    flat = torch.zeros(max_elements, dtype=value.dtype, device=runtime.device)
    position = 0
    for chunk in value.chunks:
        assert isinstance(chunk.data, Tensor)  # a rank's shards of a model are in memory
        flat[position : position + chunk.data.numel()] = chunk.data.reshape(-1)
        position += chunk.data.numel()
    gathered = runtime.all_gather(flat.view(torch.uint8)).view(value.dtype)
    result = torch.empty(value.shape, dtype=value.dtype, device=runtime.device)
    for boxes, run in zip(boxes_by_rank, gathered, strict=True):
        position = 0
        for offsets, box in boxes:
            box_slices = tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))
            result[box_slices] = run[position : position + prod(box)].view(box)
            position += prod(box)
    return result


def check_covered(shape: tuple[int, ...], boxes_by_rank: Sequence[Sequence[Box]], name: Any) -> None:
    """Refuse a tensor that copy 0 does not cover exactly once: a hole would keep whatever was in memory.

    Args:
        shape: The shape of the tensor.
        boxes_by_rank: The boxes of copy 0, by rank.
        name: The name of the tensor.

    Raises:
        ShardingError: Boxes leave a hole or overlap.
    """
    fault = find_fault(shape, [box for boxes in boxes_by_rank for box in boxes if prod(box[1])])
    if fault is not None:
        raise ShardingError(
            f"{name} of shape {list(shape)} can't be gathered: {fault}, over all ranks.\n"
            "The boxes that a backend returns for copy 0 of a tensor must cover it exactly once: report this to the "
            "authors of the strategy's package."
        )
