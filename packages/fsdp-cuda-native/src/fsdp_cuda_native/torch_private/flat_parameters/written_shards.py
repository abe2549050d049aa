"""Writes to parameters between their forward pass and their backward pass.

In one process autograd saves the parameter, and torch raises in the backward pass if it was written to since. FSDP1
gathers in ``_pre_backward_hook`` whatever the shard holds by then, in new memory whose count of writes says nothing:
the gradient would be that of other values, without a word. Here writes to the shards are counted at the end of a unit's
call and again in the backward pass. A parameter that was written to is refused if the graph needs it: its values are
among those that autograd nodes have saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core import ShardingError
from fsdp_core.sharding import count_data_writes, times_written, without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = ["count_writes", "count_writes_to_each", "refuse_written_since"]

_version = attrgetter("_version")

#: Whether a node's saved tensors can be read without unpacking them, which may run hooks. Not on torch 2.9.
_SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def count_writes(unit: FSDP) -> int:
    """How often the parameters that optimizers hold of a unit were written to, also through their ``.data``."""
    flat = handle_of(unit).flat_param
    params = flat._params or [flat]
    with without_torch_function():
        return sum(map(times_written, params)) + count_data_writes(params)


def count_writes_to_each(unit: FSDP) -> list[int]:
    """How often each original parameter of a unit was written to, by torch's count alone; none if it keeps none."""
    flat = handle_of(unit).flat_param
    with without_torch_function():  # parameters may be guarded
        return list(map(_version, flat._params or ()))


def refuse_written_since(unit: FSDP, counts_at_call: list[int]) -> None:
    """Refuse a backward pass that would gather other values than its graph was computed with.

    Args:
        unit: The unit, whose output the pass has reached.
        counts_at_call: What :func:`count_writes_to_each` returned at the end of the unit's call.

    Raises:
        ShardingError: A parameter that the graph needs was written to since. In one process torch raises then.
    """
    counts = count_writes_to_each(unit)
    if counts == counts_at_call:
        return
    written_indices = [index for index, count in enumerate(counts_at_call) if count != counts[index]]
    if needed_indices := _find_saved(unit, written_indices):
        names = [repr(handle_of(unit).user_names[index]) for index in needed_indices]
        were = f"{names[0]} was" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} were"
        raise ShardingError(
            f"{were} written to between the forward pass and this backward pass, which computes with the values: by an "
            "optimizer's step, a checkpoint that was loaded, or by hand. In one process torch raises that a variable "
            "was modified by an in-place operation.\n"
            "Run the backward pass before that, or the forward pass again after it."
        )


def _find_saved(unit: FSDP, indices: Sequence[int]) -> list[int]:
    """Which of a unit's parameters are saved by the running autograd node or by those that run after it.

    Parameters that the graph has saved by hooks, such as copies on the host, are not among them.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    gathered = handle._get_padded_unsharded_flat_param() if handle.uses_sharded_strategy else flat
    storage = gathered.untyped_storage()._cdata
    offsets = handle.offsets()
    ranges = {index: (offsets[index], offsets[index] + flat._numels[index]) for index in indices}  # of flat elements
    saved_indices: set[int] = set()
    for tensor in _tensors_saved_from_here():
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata == storage:
            first = tensor.storage_offset()
            last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            saved_indices.update(index for index, (begin, end) in ranges.items() if begin <= last and first < end)
    return sorted(saved_indices)


def _tensors_saved_from_here() -> Iterator[Tensor]:
    """The tensors that are saved by the running autograd node and by the nodes that run after it."""
    nodes: list[Any] = [torch._C._current_autograd_node()]
    visited: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        yield from _tensors_saved_by(node)
        next_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None} - visited
        visited |= next_nodes
        nodes += next_nodes


def _tensors_saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that an autograd node has saved; without those that hooks have packed, if that can be told."""
    for name in dir(node):
        if _SHOWS_SAVED and name.startswith("_raw_saved_"):
            for saved in _as_tuple(getattr(node, name)):
                if saved is not None and saved.unpack_hook is None and isinstance(saved.data, Tensor):
                    yield saved.data
        elif not _SHOWS_SAVED and name.startswith("_saved_"):
            with suppress(RuntimeError):  # freed, or of a custom function
                yield from (saved for saved in _as_tuple(getattr(node, name)) if isinstance(saved, Tensor))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
