"""Takes the tensors that a checkpoint leaves out from the module that is restored, or from the base that is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.base_tensors import BaseTensor
from fsdp_core.checkpoint.left_out.base_values import digests
from fsdp_core.checkpoint.left_out.named_base import BoxesOfSource, find_all
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.errors import CheckpointError, CheckpointMismatchError
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["has_left_out", "left_out_in", "with_base", "with_own_values"]


def left_out_in(nest: Any) -> Iterator[SavedTensor]:
    """Yield the tensors of a loaded nest that the checkpoint leaves out."""
    if isinstance(nest, SavedTensor):
        if nest.digest is not None:
            yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from left_out_in(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from left_out_in(value)


def has_left_out(nest: Any) -> bool:
    """Whether a loaded nest has tensors that the checkpoint leaves out."""
    return next(left_out_in(nest), None) is not None


def with_base(nest: Any, path: StrPath, runtime: Runtime | None = None) -> Any:
    """Return a loaded nest whose left-out tensors are read from a base. With a runtime, all ranks must call it.

    Args:
        nest: What a load has returned.
        path: The base.
        runtime: The ranks.

    Raises:
        CheckpointFormatError: The base can't be read.
        CheckpointMismatchError: It is another base; the message names the first tensor that it lacks.
    """
    tensors = {tensor.key: _as_base_tensor(tensor) for tensor in left_out_in(nest)}
    return _replaced(nest, find_all(path, tensors, runtime)) if tensors else nest


def with_own_values(
    state: Mapping[str, Any],
    own_state: Mapping[str, Any],
    *,
    runtime: Runtime,
    base: StrPath | None,
    instead: str,
) -> dict[str, Any]:
    """Return a model's state to load, whose left-out tensors have the module's own values, or those of a base.

    The module's own values are taken where they have the digest that was saved. All ranks must call it.

    Args:
        state: By name: what a checkpoint has of the model.
        own_state: By name: what the module has.
        runtime: The ranks.
        base: A folder or file with the values of those that the module does not have; ``None`` for none.
        instead: What to type where the module has other values, and no base is named.

    Raises:
        CheckpointMismatchError: The module has other values, and the base, if one is named, as well. The message names
            the first tensor.
        CheckpointFormatError: The base can't be read.
    """
    left_out = {name: value for name, value in state.items() if isinstance(value, SavedTensor) and value.digest}
    own_parts = {
        name: chunked(own_state[name], rank=runtime.rank)
        for name, saved in left_out.items()
        if isinstance(own_state.get(name), Tensor | ChunkedTensor) and tuple(own_state[name].shape) == saved.shape
    }
    parts = [_as_saved(part, left_out[name].dtype) for name, part in own_parts.items()]
    own_digests = dict(zip(own_parts, digests(parts, runtime, "comparing the module with the base"), strict=True))
    restored: dict[str, Any] = dict(state)
    differing = []
    for name, saved in left_out.items():
        if name not in own_parts:
            continue  # the load refuses it, or skips it if it is not strict
        if own_digests[name] == saved.digest:
            boxes = _OwnBoxes(key=saved.key, part=own_parts[name])
            restored[name] = replace(saved, digest=None, _boxes=boxes)
        else:
            differing.append(name)
    if differing and base is not None:
        tensors = {left_out[name].key: _as_base_tensor(left_out[name]) for name in differing}
        restored = _replaced(restored, find_all(base, tensors, runtime))
    elif differing:
        first = differing[0]
        more = f", and so have {len(differing) - 1} others" if len(differing) > 1 else ""
        raise CheckpointMismatchError(
            f"the checkpoint was saved without what was not trained, and this module has another base: {first!r} has "
            f"other values in it than in the run that saved ({own_digests[first]} and not {left_out[first].digest})"
            f"{more}.\n{instead}"
        )
    return restored


@dataclass(frozen=True, kw_only=True)
class _OwnBoxes:
    """Reads boxes from a module's own part of a tensor, which has the values that were saved."""

    key: str
    part: ChunkedTensor

    def read_into(self, chunk: Chunk) -> None:
        assert isinstance(chunk.data, Tensor)
        for own in self.part.chunks:
            data = own.data
            if tuple(own.offsets) != tuple(chunk.offsets) or tuple(data.shape) != tuple(chunk.data.shape):
                continue
            if not isinstance(data, Tensor):
                data = data.read((0,) * len(data.shape), tuple(data.shape))
            is_same_memory = data.device == chunk.data.device and data.data_ptr() == chunk.data.data_ptr()
            if not (is_same_memory and data.dtype == chunk.data.dtype and data.device.type != "xla"):
                with torch.no_grad():
                    chunk.data.detach().copy_(data)
            return
        raise CheckpointError(
            f"{self.key!r} is left out of the checkpoint, and this rank has only its own part of it, not the box of "
            f"shape {tuple(chunk.data.shape)} at {tuple(chunk.offsets)}.\nName the base, frozen_base='FOLDER'."
        )


def _as_saved(part: ChunkedTensor, dtype: torch.dtype) -> ChunkedTensor:
    if part.dtype == dtype:
        return part
    convertible: Any = part  # which has the methods of a tensor that convert
    converted: ChunkedTensor = convertible.to(dtype)
    return converted


def _as_base_tensor(tensor: SavedTensor) -> BaseTensor:
    assert tensor.digest is not None
    return BaseTensor(shape=tensor.shape, dtype_name=dtype_name(tensor.dtype), digest=tensor.digest)


def _replaced(nest: Any, readers: Mapping[str, BoxesOfSource]) -> Any:
    """A nest whose left-out tensors are read by the readers of their keys."""
    if isinstance(nest, SavedTensor):
        if nest.digest is None or nest.key not in readers:
            return nest
        return replace(nest, digest=None, _boxes=readers[nest.key])
    if isinstance(nest, Mapping):
        children = {key: _replaced(value, readers) for key, value in nest.items()}
        if type(nest) is dict or not isinstance(nest, dict):
            return children
        nest.update(children)  # an OrderedDict, or a defaultdict, which the load has just made
        return nest
    if type(nest) is list:
        return [_replaced(value, readers) for value in nest]
    if type(nest) is tuple:
        return tuple(_replaced(value, readers) for value in nest)
    return nest
