"""Lets writes to parts of DTensors reach the DTensors: torch returns copies of some parts, where views are expected.

``p.grad[0]`` of a gradient that is sharded by rows lies on one rank. torch gathers it as a copy on all of them, so that
``p.grad[padding_idx].zero_()`` zeroes a copy, without a word. Here such a copy takes what is written to it to the
DTensor that it is a copy of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["CopiedView", "write_through_copied_views"]

#: Returns the view of a full tensor.
View = Callable[[Tensor], Tensor]

_ATEN: Any = torch.ops.aten

#: What torch computes by a copy if it cuts a dimension that is sharded. All other views keep the shards' memory.
_VIEWS = (
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.diagonal.default,
)


#: What torch averages over each rank's part by itself, and then over the ranks, as if parts were of one size.
_MEANS = (
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.huber_loss.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.binary_cross_entropy.default,
    _ATEN.binary_cross_entropy_with_logits.default,
)

#: What torch writes to a gathered copy, which it then takes for the shards. Other such operations raise.
_WRITES = (_ATEN.index_add_.default, _ATEN.index_copy_.default, _ATEN.scatter_add_.default)

#: What updates the running statistics of a batch normalisation, its fourth and fifth arguments.
_NORMALISATIONS = (
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN._batch_norm_with_update.default,
)

#: What torch sums over ranks too, by each rank's norm or for no dimension where all are meant.
_SUMS = (_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.nansum.default, _ATEN.mean.dim)

#: What torch leaves as a sum of booleans, of which it then computes as if each rank's were a number.
_DISJUNCTIONS = (_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims)

#: The number of ``reduction="mean"``, the default of all of them.
_MEAN = 1

#: What has no value for a part without elements, and raises on the ranks that hold such a part.
_EXTREMES = (
    *(_ATEN.max.default, _ATEN.min.default, _ATEN.amax.default, _ATEN.amin.default),
    *(_ATEN.argmax.default, _ATEN.argmin.default, _ATEN.aminmax.default, _ATEN._foreach_max.default),
    *(_ATEN.linalg_vector_norm.default, _ATEN._foreach_norm.Scalar, _ATEN.dist.default),
)


class CopiedView(DTensor):
    """A copy of a part of a DTensor that behaves as the view that was asked for."""

    _fsdp_source: DTensor  # which the view is of
    _fsdp_view: View  # returns the view, if it is given a full tensor of the source's shape
    _fsdp_source_version: int  # of the values that were copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        views: list[CopiedView] = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, CopiedView)]
        written_leaves = tree_flatten(_written_arguments(func, args, kwargs))[0]
        written: list[CopiedView] = [leaf for leaf in written_leaves if isinstance(leaf, CopiedView)]
        if written and torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedCapabilityError(
                f"{func.overloadpacket.__name__} was called on a part of a sharded parameter or gradient, such as "
                "p[0].normal_(), for which each rank would draw numbers of its own.\n"
                "Draw them for all of it, with p.normal_() or torch.randn_like(p); or write to it within "
                "fsdp_core.gathered(module, modifier_rank=0), between steps."
            )
        for view in views:
            view._follow_source()
        result = _call_with_dtensors(func, args, kwargs, views)
        for view in written:
            view._write_to_source()
        if func.is_view:
            return _as_views(result, views[0]._fsdp_source, views[0]._fsdp_view, partial(func, **kwargs), args[1:])
        return result

    def _follow_source(self) -> None:
        """Copy the source's values again if it was written to since."""
        version = _version(self._fsdp_source)
        if version != self._fsdp_source_version:
            self._fsdp_source_version = version
            full_view = self._fsdp_view(_full(self._fsdp_source))
            self._local_tensor.copy_(_part(full_view, self))

    def _write_to_source(self) -> None:
        full = _full(self._fsdp_source).clone()
        self._fsdp_view(full).copy_(_full(self))
        self._fsdp_source._local_tensor.copy_(_part(full, self._fsdp_source))


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of an operation that it writes to."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def _call_with_dtensors(func: Any, args: Any, kwargs: Any, views: list[CopiedView]) -> Any:
    """Call an operation with copied views as the DTensors that they are."""
    instances: list[Any] = [*views]
    for instance in instances:
        instance.__class__ = DTensor
    try:
        return func(*args, **kwargs)
    finally:
        for instance in instances:
            instance.__class__ = CopiedView


def _as_views(result: Any, source: DTensor, outer: View, func: Callable[..., Any], args: Any) -> Any:
    """Make copied views of what a view operation has returned: one tensor, or several.

    Args:
        result: What it has returned.
        source: The DTensor that writes are to reach.
        outer: Returns the operation's first argument, as a view of the full source that it is given; the source itself
            if the operation's first argument is no view.
        func: The operation.
        args: Its further arguments.
    """
    is_tensor = isinstance(result, Tensor)
    for index, tensor in enumerate([result] if is_tensor else result):
        instance: Any = tensor
        instance.__class__ = CopiedView
        instance._fsdp_source = source
        instance._fsdp_view = partial(_view_of_full, outer, func, args, None if is_tensor else index)
        instance._fsdp_source_version = _version(source)
    return result


def _view_of_full(outer: View, func: Callable[..., Any], args: Any, index: int | None, full: Tensor) -> Tensor:
    result: Any = func(outer(full), *args)
    view: Tensor = result if index is None else result[index]
    return view


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _full(tensor: DTensor) -> Tensor:
    """All of a DTensor, on every rank."""
    return _redistributed(tensor._local_tensor, tensor, tensor.placements, _everywhere(tensor))


def _part(full: Tensor, like: DTensor) -> Tensor:
    """The part of a full tensor that this rank has of a DTensor of its shape."""
    return _redistributed(full, like, _everywhere(like), like.placements)


def _redistributed(local: Tensor, like: DTensor, placements: Any, target: Any) -> Tensor:
    with torch.no_grad():
        whole = DTensor.from_local(
            local.detach(), like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return whole.redistribute(placements=target).to_local()


def _everywhere(tensor: DTensor) -> list[Replicate]:
    return [Replicate()] * tensor.device_mesh.ndim


def write_through_copied_views() -> None:
    """Let writes to torch's copies of DTensors, and of parts of them, reach the DTensors, from now on. Idempotent.

    From then on, what torch computes wrongly of parts is right too, such as sums of norms; or it raises: means of
    losses, where parts of a DTensor differ in size, convolutions and batch normalisations.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for func in _VIEWS:
        handlers.setdefault(func, _view)
    for func in _MEANS:
        handlers.setdefault(func, _refuse_uneven_mean)
    for func in _WRITES:
        handlers.setdefault(func, _write)
    for func in (_ATEN.fill_.Tensor, _ATEN.fill_.Scalar):
        handlers.setdefault(func, _fill)
    handlers.setdefault(_ATEN.masked_fill_.Scalar, _masked_fill)
    handlers.setdefault(_ATEN.squeeze_copy.default, _squeeze_copy)
    for func in _SUMS:
        handlers.setdefault(func, _sum)
    for func in _DISJUNCTIONS:
        handlers.setdefault(func, _any)
    for func in _NORMALISATIONS:
        handlers.setdefault(func, _refuse_parted_statistics)
    for func in _EXTREMES:
        torch_handler = handlers.get(func)
        if not isinstance(torch_handler, partial):
            handlers[func] = partial(_reduce_extreme, torch_handler)
    convolution = handlers.get(_ATEN.convolution.default)
    if convolution is not None and not isinstance(convolution, partial):
        handlers[_ATEN.convolution.default] = partial(_refuse_parted_convolution, convolution)


def _without_handler(func: Any, handler: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation as torch does without a handler: for that, the handler is removed meanwhile."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(func, None)
    try:
        return func(*args, **kwargs)
    finally:
        handlers[func] = handler


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces torch's computation of a view that may be a copy."""
    result = _without_handler(func, _view, args, kwargs)
    source: DTensor = args[0]
    memory = source._local_tensor.untyped_storage()._cdata
    tensors: list[Any] = [result] if isinstance(result, Tensor) else result
    if all(tensor._local_tensor.untyped_storage()._cdata == memory for tensor in tensors):
        return result
    return _as_views(result, source, _itself, partial(func, **kwargs), args[1:])


def _itself(full: Tensor) -> Tensor:
    return full


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``fill_``, also with a tensor of one value, which ``p.grad[:, 0] = 0`` calls, and which DTensor lacks.

    torch fills each rank's term of a sum that is not reduced yet.
    """
    target, value = args
    if isinstance(value, Tensor):
        value = (value.full_tensor() if isinstance(value, DTensor) else value).item()
    _reduce(target)
    target._local_tensor.fill_(value)
    return target


def _masked_fill(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``masked_fill_``, with which torch fills each rank's term of a sum that is not reduced yet."""
    _reduce(args[0])
    return _without_handler(func, _masked_fill, args, kwargs)


def _squeeze_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``squeeze_copy``, with which torch also squeezes what is one row of a shard, and more of the whole."""
    return args[0].squeeze().clone()


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces sums and means: torch adds up each rank's part of a norm, and takes ``dim=[]``, which is all, for none.

    By ``dim=[]`` are the gradients of infinity norms, and of the largest and smallest element.
    """
    values, *others = args
    placements = [Replicate() if hasattr(each, "norm_type") else each for each in values.placements]  # not reduced yet
    if placements != list(values.placements):
        values = values.redistribute(placements=placements)
    if others and others[0] == []:
        others[0] = list(range(values.ndim))
    return _without_handler(func, _sum, (values, *others), kwargs)


def _any(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces ``any``, whose result is reduced over the ranks."""
    result: DTensor = _without_handler(func, _any, args, kwargs)
    return result.redistribute(placements=[Replicate() if each.is_partial() else each for each in result.placements])


def _reduce(target: DTensor) -> None:
    """Let a DTensor that is a sum of the ranks' terms, which is not reduced yet, be the sum."""
    if any(placement.is_partial() for placement in target.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in target.placements]
        reduced = target.redistribute(placements=placements)
        target._local_tensor.copy_(reduced._local_tensor)
        target._spec = reduced._spec


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces an operation that writes to elements which it finds by their indices in the whole tensor."""
    target: DTensor = args[0]
    others: list[Any] = [leaf for leaf in tree_flatten((args[1:], kwargs))[0] if isinstance(leaf, Tensor)]
    is_mixed = any(not isinstance(each, DTensor) and each.numel() != 1 for each in others)  # which torch refuses
    if is_mixed or all(placement.is_replicate() for placement in target.placements):
        return _without_handler(func, _write, args, kwargs)
    full = _full(target).clone()
    func(full, *tree_map(_full_of, args[1:]), **tree_map(_full_of, kwargs))
    target._local_tensor.copy_(_part(full, target))
    return target


def _full_of(value: Any) -> Any:
    return _full(value) if isinstance(value, DTensor) else value


def _refuse_uneven_mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces a loss that is a mean over elements."""
    values: DTensor = next(argument for argument in args if isinstance(argument, DTensor))
    arguments = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    if arguments.get("reduction", _MEAN) == _MEAN and _is_uneven(values):
        name = func.overloadpacket.__name__
        raise UnsupportedCapabilityError(
            f"{name} of a sharded parameter or gradient would be the mean of means of the ranks' parts, which differ "
            "in size.\n"
            f"Write {name}(a, b, reduction='none').mean(), which is right."
        )
    return _without_handler(func, _refuse_uneven_mean, args, kwargs)


def _refuse_parted_convolution(torch_handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces convolutions, for which torch takes weights for the same on all ranks, and batches for even ones."""
    values, *weights = args[:3]
    if not isinstance(values, DTensor):
        return torch_handler(func, args, kwargs)  # which raises
    parted = [placement for placement in values.placements if placement != Shard(0)]
    parted += [placement for weight in weights if isinstance(weight, DTensor) for placement in weight.placements]
    is_transposed = args[6]
    if is_transposed or _is_uneven(values) or not all(placement.is_replicate() for placement in parted):
        raise UnsupportedCapabilityError(
            "a convolution of a sharded parameter or gradient would be that of the ranks' parts.\n"
            "Write torch.nn.functional.conv2d(p.full_tensor(), weight) of plain tensors, on all ranks."
        )
    return torch_handler(func, args, kwargs)


def _refuse_parted_statistics(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces batch normalisations, with which torch writes statistics to a part of a copy of them."""
    statistics = [each for each in args[3:5] if isinstance(each, DTensor)]
    parted = [placement for each in statistics for placement in each.placements if not placement.is_replicate()]
    if statistics and (parted or Shard(1) in args[0].placements):
        raise UnsupportedCapabilityError(
            "a batch normalisation of a tensor whose channels are sharded would update the running statistics of a "
            "copy of them.\nWrite torch.nn.functional.batch_norm(x.full_tensor(), ...) of plain tensors, on all ranks."
        )
    return _without_handler(func, _refuse_parted_statistics, args, kwargs)


def _reduce_extreme(torch_handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces a reduction to a largest or smallest element: where some rank holds none, all reduce the whole."""
    args = tree_map(_without_empty_parts, args)
    if torch_handler is not None:
        return torch_handler(func, args, kwargs)
    return _without_handler(func, DTensor._op_dispatcher._custom_op_handlers[func], args, kwargs)


def _without_empty_parts(value: Any) -> Any:
    """An argument, gathered if it is a DTensor of which some rank may have no element."""
    if not isinstance(value, DTensor) or value.numel() == 0:
        return value
    sizes = [(value.shape[dim], parts) for dim, parts in _count_parts(value).items()]
    if all(-(-size // parts) * (parts - 1) < size for size, parts in sizes):
        return value
    return value.redistribute(placements=_everywhere(value))


def _is_uneven(tensor: DTensor) -> bool:
    """Whether parts of a DTensor may differ in size."""
    return any(tensor.shape[dim] % parts for dim, parts in _count_parts(tensor).items())


def _count_parts(tensor: DTensor) -> dict[int, int]:
    """By dimension of a DTensor that is sharded, into how many parts.

    What is sharded in strides, such as a flattened matrix of which ranks have columns, is cut into pieces, and each of
    these into parts.
    """
    parts_by_dim: dict[int, int] = {}
    parts_in_strides: dict[int, int] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)  # only of those that shard
        if dim is not None:
            parts_by_dim[dim] = parts_by_dim.get(dim, 1) * size
            parts_in_strides[dim] = max(parts_in_strides.get(dim, 1), size * getattr(placement, "split_factor", 1))
    return {dim: max(parts, parts_in_strides[dim]) for dim, parts in parts_by_dim.items()}
