"""Which part of a module's tensor each tensor of a folder is, for models that are not stored as they run.

Transformers describes the difference as operations on full tensors, such as stacking those of experts. They are run
once, on tensors without memory that lie one behind the other in one storage. The position of a result in that storage
says which part of which tensor it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.state.boxes import overlap, row_major_strides
from fsdp_core.state.coverage import Box

__all__ = ["View", "full_view", "group_by_source", "views_of"]


@dataclass(frozen=True, kw_only=True)
class View:
    """A tensor of a folder, as a box of a tensor of the module whose dimensions may be in another order.

    Attributes:
        source: The name of the module's tensor.
        offsets: Where the box begins in it.
        lengths: The shape of the box.
        dims: For each dimension of the folder's tensor, which one of the module's it is; ``None`` if it has size 1.
    """

    source: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the folder's tensor."""
        return tuple(1 if dim is None else self.lengths[dim] for dim in self.dims)

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Return the overlap of this view with a box of the module's tensor: as a box of that, and of the folder's."""
        common = overlap((self.offsets, self.lengths), box)
        if common is None:
            return None
        begins = [0 if dim is None else common[0][dim] - self.offsets[dim] for dim in self.dims]
        lengths = [1 if dim is None else common[1][dim] for dim in self.dims]
        return common, (tuple(begins), tuple(lengths))

    def as_stored(self, data: Tensor) -> Tensor:
        """Bring the dimensions of a box of the module's tensor into the order in which the folder has them."""
        kept_dims = [dim for dim in self.dims if dim is not None]
        dropped_dims = [dim for dim in range(data.ndim) if dim not in kept_dims]
        rearranged = data.permute(*kept_dims, *dropped_dims)
        for _ in dropped_dims:
            rearranged = rearranged.squeeze(-1)
        for index, dim in enumerate(self.dims):
            if dim is None:
                rearranged = rearranged.unsqueeze(index)
        return rearranged


def full_view(name: str, shape: Sequence[int]) -> View:
    """The view of a whole tensor, stored as it is.

    Example:
        >>> full_view("weight", (4, 2)).shape
        (4, 2)
    """
    return View(source=name, offsets=(0,) * len(shape), lengths=tuple(shape), dims=tuple(range(len(shape))))


class _WithoutCopies(TorchFunctionMode):
    """Makes ``contiguous()`` and ``clone()`` return the tensor itself, so that results stay views of the storage."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def views_of(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    subject: str,
) -> dict[str, View]:
    """Find out which parts of tensors an operation returns.

    Args:
        tensors: The shapes and dtypes of the module's tensors, by name.
        convert: Takes the module's tensors, and returns the folder's.
        subject: The name of what is converted, for errors.

    Returns:
        The part that each tensor of the folder is, in the order in which ``convert`` returns them.

    Raises:
        UnsupportedCapabilityError: A tensor of the folder is not a part of one tensor, because it is computed, or put
            together from several.

    Example:
        >>> split = lambda state: {f"expert.{i}": part for i, part in enumerate(state["experts"])}
        >>> views_of({"experts": ((2, 3), torch.float32)}, split, "a model")["expert.1"]
        View(source='experts', offsets=(1, 0), lengths=(1, 3), dims=(1,))
        >>> views_of({"unused": ((0, 4), torch.float32)}, lambda state: state, "a model")["unused"].lengths
        (0, 4)
    """
    consecutive = _ConsecutiveTensors(tensors)
    with torch.no_grad(), _WithoutCopies():
        converted = convert(consecutive.tensors)
    return {name: consecutive.view(name, tensor, subject) for name, tensor in converted.items()}


class _ConsecutiveTensors:
    """Tensors without memory, one behind the other in one storage per dtype."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._names_by_dtype: dict[torch.dtype, list[str]] = {}
        for name, (_, dtype) in tensors.items():
            self._names_by_dtype.setdefault(dtype, []).append(name)
        self._shapes = {name: shape for name, (shape, _) in tensors.items()}
        self._begins: dict[torch.dtype, list[int]] = {}
        self._storage_bytes: dict[torch.dtype, int] = {}
        views: dict[str, Tensor] = {}
        for dtype, names in self._names_by_dtype.items():
            # An empty tensor gets one element too, so that no two begin at the same one.
            sizes = [max(1, math.prod(self._shapes[name])) for name in names]
            begins = [0, *accumulate(sizes)]
            self._begins[dtype] = begins[:-1]
            # view() recognises this storage by its size: one element more than a copy of all of its tensors has.
            flat = torch.empty(begins[-1] + 1, dtype=dtype, device="meta")
            self._storage_bytes[dtype] = flat.untyped_storage().nbytes()
            for name, begin in zip(names, begins, strict=False):
                shape = self._shapes[name]
                views[name] = flat.as_strided(shape, row_major_strides(shape), begin)
        self.tensors = {name: views[name] for name in tensors}

    def view(self, name: str, tensor: Tensor, subject: str) -> View:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() == self._storage_bytes.get(tensor.dtype):
            begins = self._begins[tensor.dtype]
            index = bisect_right(begins, tensor.storage_offset()) - 1
            source = self._names_by_dtype[tensor.dtype][index]
            first_element = tensor.storage_offset() - begins[index]
            view = _as_box(source, self._shapes[source], tensor, int(first_element))
            if view is not None:
                return view
        raise UnsupportedCapabilityError(
            f"{name!r} of {subject} can't be stored from shards: it is computed from whole tensors of the module, and "
            "no rank holds those.\nSave a checkpoint, and convert it in one process: gather the weights with "
            "fsdp_core.load_state_dict(checkpoint), and pass them as state_dict= to the model's own save_pretrained()."
        )


def _as_box(source: str, shape: tuple[int, ...], tensor: Tensor, first_element: int) -> View | None:
    """Return a tensor as a view of a contiguous source; ``None`` if it is not a box of that.

    Args:
        source: The name of the source.
        shape: The shape of the source.
        tensor: The tensor, of which the shape and the strides are used.
        first_element: The index of its first element in the source.
    """
    if 0 in shape or 0 in tensor.shape:
        return full_view(source, shape) if tuple(tensor.shape) == shape else None
    strides = row_major_strides(shape)
    offsets = []
    for size, stride in zip(shape, strides, strict=True):
        offset = first_element // stride if size > 1 else 0
        offsets.append(offset)
        first_element -= offset * stride
    if first_element:
        return None
    lengths = [1] * len(shape)
    dims: list[int | None] = []
    unused_dims = [dim for dim, size in enumerate(shape) if size > 1]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            dims.append(None)
            continue
        dim = next((dim for dim in unused_dims if strides[dim] == stride), None)
        if dim is None or offsets[dim] + size > shape[dim]:
            return None
        unused_dims.remove(dim)
        lengths[dim] = size
        dims.append(dim)
    return View(source=source, offsets=tuple(offsets), lengths=tuple(lengths), dims=tuple(dims))


def group_by_source(views: Mapping[str, View]) -> dict[str, list[tuple[str, View]]]:
    """Group views by the module's tensor that they are parts of, each with its name."""
    views_of_source: dict[str, list[tuple[str, View]]] = {}
    for name, view in views.items():
        views_of_source.setdefault(view.source, []).append((name, view))
    return views_of_source
