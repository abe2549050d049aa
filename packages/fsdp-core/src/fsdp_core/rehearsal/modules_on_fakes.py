"""Lets modules, Lightning and device meshes work on fake tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.nn.utils import rnn

from fsdp_core.errors import ShardingError
from fsdp_core.rehearsal.known_values import KnownValues
from fsdp_core.torch_private.fake_tensors import FakeTensor, flat_param, fsdp_runtime, no_dispatch, tree_map_only

__all__ = ["fakes_allowed", "replaced"]


@contextmanager
def fakes_allowed(values: KnownValues) -> Iterator[None]:
    """A context in which what needs real tensors gets them, and what can't work on fake ones is left out.

    Args:
        values: The values that are known of fake tensors.
    """
    with ExitStack() as contexts:
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                contexts.enter_context(replaced(DeviceMesh, name, functools.partial(_on_real_tensors, values)))
        replacements: dict[int, tuple[Tensor, Tensor]] = {}
        contexts.enter_context(replaced(nn.Module, "_apply", lambda _: _apply_to_fakes(replacements)))
        contexts.enter_context(_added(FakeTensor, "__deepcopy__", _copy_fake))
        contexts.enter_context(
            replaced(distributed, "_verify_param_shape_across_processes", lambda _: _compare_nothing)
        )
        contexts.enter_context(replaced(flat_param, "_data_ptr_allocated", lambda _: _has_bytes))
        contexts.enter_context(replaced(DistributedDataParallel, "__init__", _with_own_reduction))
        contexts.enter_context(replaced(torch, "tensor", _tensor_of_numbers))
        contexts.enter_context(replaced(rnn, "_VF", lambda functions: _RecurrentFunctions(functions)))
        contexts.enter_context(replaced(rnn, "invert_permutation", lambda _: _invert_permutation))
        for module_name, name in _LOOKS_FOR_FAKES:
            if hasattr(sys.modules.get(module_name), name):
                contexts.enter_context(replaced(sys.modules[module_name], name, lambda _: _is_never))
        for name, exchange in _EXCHANGES.items():
            for owner in (dist, distributed_c10d):
                contexts.enter_context(replaced(owner, name, functools.partial(_instead, exchange)))
        contexts.enter_context(replaced(flat_param.FlatParamHandle, "_all_gather_flat_param", lambda _: _gather_flat))
        contexts.enter_context(replaced(flat_param.FlatParamHandle, "_get_unpadded_shard", lambda _: _shard_of_flat))
        contexts.enter_context(replaced(fsdp_runtime, "_get_reduce_scatter_tensors", lambda _: _tensors_to_reduce))
        yield


def _with_own_reduction(build: Callable[..., None]) -> Callable[..., None]:
    """DDP's constructor, with a hook that reduces in place of DDP.

    DDP itself takes the reduced bucket from the process group, and an imagined one returns none.
    """

    def reduce(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer(), group=state)
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    # torch compares the hook's annotations with its classes, and annotations in this file are strings
    reduce.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}

    @functools.wraps(build)
    def build_with_reduction(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        with replaced(dist, "_compute_bucket_assignment_by_size", functools.partial(_assign_as_rebuilt, self)):
            build(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, reduce)
        reducer: Any = _ReducerWithFirstBuckets(self)
        self.reducer = reducer

    return build_with_reduction


#: The size of DDP's first bucket, of the gradients that are there first.
_FIRST_BUCKET = 1 << 20


def _assign_as_rebuilt(module: DistributedDataParallel, assign: Callable[..., Any]) -> Callable[..., Any]:
    """Put gradients into buckets at once as DDP would after the first backward pass.

    It begins with one bucket, and rebuilds when it knows in which order gradients are ready. It is taken to be the
    reverse of that of the parameters.
    """

    def assign_(parameters: list[Tensor], limits: Any, expects_sparse: list[bool]) -> Any:
        limits = [_FIRST_BUCKET, module.bucket_bytes_cap]
        buckets, bucket_limits = assign(parameters[::-1], limits, expects_sparse[::-1])
        last = len(parameters) - 1
        # DDP reverses the order of the buckets
        return [[last - index for index in bucket] for bucket in reversed(buckets)], bucket_limits[::-1]

    return assign_


class _ReducerWithFirstBuckets:
    """DDP's reducer, which does not rebuild its buckets after the first backward pass.

    To rebuild them, ranks exchange an order of gradients in memory that fakes don't have. There, DDP refuses to go on
    if a backward pass has left gradients out; this does so too.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._reducer = module.reducer
        self._names: set[str] = set()
        self._with_gradient: set[str] = set()
        self._is_reducing = False
        if module.static_graph or module.find_unused_parameters:
            return  # DDP then reduces without them
        for name, parameter in module.module.named_parameters():
            if parameter.requires_grad and name not in module.parameters_to_ignore:
                self._names.add(name)
                parameter.register_post_accumulate_grad_hook(functools.partial(self._note_gradient, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        if self._is_reducing:
            self._with_gradient.add(name)

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        self._is_reducing = True
        self._with_gradient.clear()
        self._reducer.prepare_for_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        self._is_reducing = False
        without = sorted(self._names - self._with_gradient) if self._with_gradient else []
        if without:
            names = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
            raise ShardingError(
                f"DDP needs a gradient of each parameter in each backward pass, and has none of {names}"
            )
        return False


def _tensor_of_numbers(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor()``, which reads the memory of scalars in lists: of norms of gradients, such as Lightning logs."""

    @functools.wraps(build)
    def build_of_numbers(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, list | tuple):
            data = [item.item() if isinstance(item, FakeTensor) and item.dim() == 0 else item for item in data]
        return build(data, *args, **kwargs)

    return build_of_numbers


class _RecurrentFunctions:
    """torch's functions of recurrent layers, with a ``pad_packed_sequence()`` that writes to no fake's memory."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def _pad_packed_sequence(
        self, rows: Tensor, sizes: Tensor, is_batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        counts = sizes.tolist()
        padded = rows.new_full((max(len(counts), total_length), counts[0], *rows.shape[1:]), padding_value)
        start = 0
        for step, count in enumerate(counts):
            padded[step, :count] = rows[start : start + count]
            start += count
        lengths = [sum(count > sequence for count in counts) for sequence in range(counts[0])]
        with no_dispatch():
            real_lengths = torch.tensor(lengths)
        return padded.transpose(0, 1) if is_batch_first else padded, real_lengths


def _invert_permutation(permutation: Tensor | None) -> Tensor | None:
    """The order that undoes another: torch's own writes it to a tensor that is not filled, and so not known."""
    return None if permutation is None else permutation.argsort()


#: Functions by which libraries learn that a tensor is fake, to compute what a compiler can follow: masks of attention,
#: of which an eager run needs none where nothing is padded.
_LOOKS_FOR_FAKES = (("transformers.utils.import_utils", "is_fake_tensor"),)


def _is_never(tensor: object) -> bool:
    return False


def _instead(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return replacement


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """Nothing to do: the peers have what this rank has."""


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]


#: What stands for torch's exchanges of objects, which are bytes of tensors: imagined peers give what this rank gives.
_EXCHANGES: dict[str, Callable[..., None]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}


#: The methods that compute with a mesh's tensor of ranks, whose values they need.
_MESH_METHODS = (
    *("__init__", "_compute_coordinate_on_dim", "__getitem__", "_flatten", "_concatenate", "_unflatten"),
    *("get_local_rank", "get_coordinate", "__hash__", "__eq__", "_compute_coordinates_from_mesh"),
)


def _on_real_tensors(values: KnownValues, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        real_args, real_kwargs = tree_map_only(Tensor, values.real_if_known, (args, kwargs))
        with no_dispatch():
            return function(*real_args, **real_kwargs)

    return call


def _copy_fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a fake tensor, for :func:`copy.deepcopy`: torch's own copies the storage, which has no bytes."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copied, requires_grad=tensor.requires_grad) if is_parameter else copied
    result: Tensor = memo[id(tensor)]
    return result


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a fake tensor's memory is allocated, by its size: torch asks for the address, which is 0 for all."""
    return tensor.untyped_storage().size() > 0


def _gather_flat(handle: Any, gathered: Tensor) -> Tensor:
    """Gather a unit of FSDP1 into one tensor, as on accelerators: on CPUs, torch gathers into a view for each rank."""
    dist.all_gather_into_tensor(gathered, handle.flat_param.data, handle.process_group)
    return gathered


def _shard_of_flat(tensor: Tensor, rank: int, ranks: int) -> tuple[Tensor, int]:
    """A rank's shard of a unit of FSDP1, and its padding, without torch's view for each of many ranks."""
    flat = tensor.flatten()
    rows = -(-flat.numel() // ranks)
    start = min(rank * rows, flat.numel())
    shard = flat.narrow(0, start, min(rows, flat.numel() - start)) if start < flat.numel() else flat.new_empty(0)
    return shard, rows - shard.numel()


def _tensors_to_reduce(state: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What FSDP1 reduces, padded, and where it is reduced to, without a view for each rank."""
    rows = -(-gradient.numel() // state.world_size)
    padding = rows * state.world_size - gradient.numel()
    padded = functional.pad(gradient, [0, padding]) if padding else gradient
    return padded, gradient.new_empty(rows)


def _compare_nothing(*args: Any) -> None:
    """Stands for torch's comparison of this rank's parameters with those of other ranks, which are imagined."""


def _apply_to_fakes(replacements: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., nn.Module]:
    """What stands for ``nn.Module._apply``: it gives modules other tensors where dtype or device change.

    torch's own would swap the contents of the tensors, which it refuses while something refers to them weakly.

    Args:
        replacements: By the id of a tensor, that tensor and what has replaced it, for tied tensors to stay tied. The
            tensor is there to stay alive: no other may get its id.
    """

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                child._apply(function)
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = _convert(tensor, function, replacements)
        return module

    return apply


def _convert(
    tensor: Tensor, function: Callable[[Tensor], Tensor], replacements: dict[int, tuple[Tensor, Tensor]]
) -> Tensor:
    if id(tensor) in replacements:
        return replacements[id(tensor)][1]
    with torch.no_grad():
        result = function(tensor)
    if result.dtype is tensor.dtype and result.device == tensor.device:
        return tensor
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, requires_grad=tensor.requires_grad)
    replacements[id(tensor)] = tensor, result
    return result


@contextmanager
def _added(owner: type, name: str, value: Any) -> Iterator[None]:
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which an attribute of a class or a module is another one.

    Args:
        owner: The class, or the module.
        name: The attribute.
        wrap: Makes the other one of the original.
    """
    original = vars(owner)[name]
    is_static = isinstance(original, staticmethod)
    wrapped = wrap(original.__func__ if is_static else original)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)
