"""Layers that are sharded while they are built: each rank keeps its part, and the whole model never exists."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, Never

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from fsdp_core import devices
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.wrap import when_marked
from fsdp_core.runtime import Runtime
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.host_memory import give_back, memory_of
from fsdp_core.torch_private.process_groups import default_store
from fsdp_core.torch_private.tensors import users_of_storage, without_torch_function

__all__ = ["KeptPart", "check_same_parts", "detach_part", "is_part", "keep_parts", "kept_as_built"]

# torch 2.13 deprecates the second name for the first
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ATTRIBUTE = "_fsdp_core_kept_part"
_LARGE = 2**20  # bytes of a parameter that are worth the time of several collectives
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # those that have NaN, and all operations


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """A rank's part of a parameter whose layer was marked while it was built.

    Attributes:
        shape: The parameter's shape.
        part: The rank's contiguous range of the elements.
        rank: The index of that range.
        ranks: The number of ranges.
        digest: A digest of the whole parameter, of when all of it was last here; ranks compare it.
        spoiled: Whether it was computed of elements that other ranks keep.
    """

    shape: torch.Size
    part: Tensor
    rank: int
    ranks: int
    digest: str
    spoiled: bool = False

    def to_full_shape(self) -> Tensor:
        """A tensor of the whole shape, with NaN for the elements of other ranks."""
        full = torch.full((self.shape.numel(),), torch.nan, dtype=self.part.dtype, device=self.part.device)
        _range_of(full, self.rank, self.ranks).copy_(self.part)
        return full.view(self.shape)

    def whole(self, device: torch.device) -> Tensor:
        """Gather the whole parameter. All ranks must call it."""
        out = self.part.new_empty(self.shape.numel(), device=device)
        self.gather(out)
        return out.view(self.shape)

    def gather(self, out: Tensor) -> None:
        """Gather the parts of all ranks. All ranks must call it.

        Args:
            out: Filled with the whole, flattened. Shape ``(n,)``, on the device of the collectives.
        """
        if out.device.type == "cpu" and out.nbytes >= _LARGE:
            self._gather_by_broadcasts(out)
            return
        count = out.numel()
        length = _length(out.numel(), self.ranks)
        part = out.new_zeros(length)
        part[: self.part.numel()].copy_(self.part)
        gathered = out if count == length * self.ranks else out.new_empty(length * self.ranks)
        _all_gather(gathered, part)
        if gathered is not out:
            out.copy_(gathered[:count])

    def _gather_by_broadcasts(self, out: Tensor) -> None:
        """The same by broadcasts: gloo's all-gather allocates the same amount of memory again."""
        for rank in range(self.ranks):
            range_of_rank = _range_of(out, rank, self.ranks)
            if rank == self.rank:
                range_of_rank.copy_(self.part)
            if range_of_rank.numel():
                dist.broadcast(range_of_rank, src=rank)


class _PartFacts(NamedTuple):
    """What ranks tell each other of a :class:`KeptPart`."""

    digest: str
    spoiled: bool


class PartOfParameter(nn.Parameter):
    """A parameter of which each rank keeps a part: it has the whole shape, without memory.

    Writing to it, as initialisers and :meth:`~torch.nn.Module.load_state_dict` do, allocates it temporarily, with NaN
    for the elements of other ranks. Reading it raises.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        with without_torch_function():
            if name in _READS_NO_VALUES:
                return func(*args, **kwargs)
            _close_unused_parameters()  # including the arguments, which are to_full_shape again below
            parameters = list(_parts_in((args, kwargs)))
            if not _may_write(name):
                _refuse_reading(parameters[0], name)
            for parameter in parameters:
                _open_parameter(parameter)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not devices.has_addresses(result):
                _refuse_reading(parameters[0], name)  # moving a module there creates new parameters
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=self.requires_grad)
            _attach_part(copied, replace(_kept_part_of(self), part=_kept_part_of(self).part.clone()))
            memo[id(self)] = copied
        parameter: nn.Parameter = memo[id(self)]
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Never:
        _refuse_reading(self, "pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kept_part = _kept_part_of(self)
        return f"PartOfParameter(shape={tuple(kept_part.shape)}, rank {kept_part.rank} of {kept_part.ranks})"


class OpenParameter(nn.Parameter):
    """A :class:`PartOfParameter` while something writes to it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
            _mark_as_open(copied, _kept_part_of(self))
            memo[id(self)] = copied
        parameter: nn.Parameter = memo[id(self)]
        return parameter


class _OpenParameters(threading.local):
    """The open parameters; per thread, because ranks may be threads."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[nn.Parameter]] = []
        self.had_any = False  # whether there were any since the last model was set up


_open_parameters = _OpenParameters()


def is_part(parameter: Tensor) -> bool:
    """Whether this rank keeps only a part of this parameter."""
    return isinstance(parameter, PartOfParameter | OpenParameter)


@contextmanager
def kept_as_built(runtime: Runtime | None) -> Iterator[None]:
    """A context in which a rank keeps only its part of each layer that is marked.

    Inside, all ranks draw rank 0's random numbers, even if they have different seeds.

    Args:
        runtime: The ranks; ``None`` if there is no process group yet, in which case everything is kept.

    Raises:
        ShardingError: Rank 0 has not begun to build a model.
    """
    if runtime is None or runtime.world_size == 1:
        yield
        return
    ranks = runtime
    with when_marked(lambda module: keep_parts(module, ranks)), _random_numbers_of_rank_0(ranks):
        try:
            yield
        finally:
            _close_unused_parameters()


@contextmanager
def _random_numbers_of_rank_0(runtime: Runtime) -> Iterator[None]:
    """Use rank 0's random numbers, without a collective: rank 0 does not wait, and may be the only rank here."""
    store = default_store()
    if store is None:
        yield
        return
    model_number = store.add(f"fsdp_core/models that rank {runtime.rank} has built", 1)
    own_states = {device: devices.random_state(device) for device in {torch.device("cpu"), runtime.device}}
    changed_devices: list[torch.device] = []
    for device, state in own_states.items():
        key = f"fsdp_core/random numbers of model {model_number}/{device.type}"
        if runtime.rank == 0:
            store.set(key, bytes(state.numpy()))
            continue
        try:
            store.wait([key], _PATIENCE)
        except dist.DistError as error:
            raise ShardingError(
                f"rank {runtime.rank} builds a model in configure_model() or under init_module(), and rank 0 has not "
                f"begun to within {_PATIENCE.total_seconds():g} s.\nBuild it on every rank."
            ) from error
        state_of_rank_0 = torch.frombuffer(bytearray(store.get(key)), dtype=torch.uint8)
        if not torch.equal(state_of_rank_0, state):
            devices.set_random_state(device, state_of_rank_0)
            changed_devices.append(device)
    try:
        yield
    finally:
        for device in changed_devices:
            devices.set_random_state(device, own_states[device])


#: How long to wait for rank 0, which may read or download something first.
_PATIENCE = timedelta(minutes=30)


def keep_parts(module: nn.Module, runtime: Runtime) -> None:
    """Keep only this rank's part of each of a layer's parameters, without communication.

    Args:
        module: The layer. Tensors on other devices than CPU and GPU, or that are not plain parameters, are left alone.
        runtime: The ranks.
    """
    _close_unused_parameters()
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and _can_keep_part(parameter):
            flat = parameter.detach().reshape(-1)
            rank = runtime.rank
            ranks = runtime.world_size
            part = _range_of(flat, rank, ranks).clone()
            kept_part = KeptPart(shape=parameter.shape, part=part, rank=rank, ranks=ranks, digest=_digest(flat))
            # NaN comes from elements of other ranks, if the layer has read a layer that was marked before
            spoiled = _open_parameters.had_any and _has_nan(flat)
            _attach_part(parameter, replace(kept_part, digest="" if spoiled else kept_part.digest, spoiled=spoiled))
            del flat
    give_back()


def detach_part(parameter: nn.Parameter) -> KeptPart | None:
    """Detach a parameter's part from it; the parameter becomes a plain one without memory.

    Returns:
        The part; ``None`` if the parameter is whole.
    """
    if isinstance(parameter, OpenParameter):
        _close_parameter(parameter)
    if not isinstance(parameter, PartOfParameter):
        return None
    kept_part = _kept_part_of(parameter)
    del parameter.__dict__[_ATTRIBUTE]
    _set_class(parameter, nn.Parameter)
    return kept_part


def check_same_parts(module: nn.Module, runtime: Runtime) -> None:
    """Raise on every rank if the ranks' parts are from different values. All ranks must call it.

    Args:
        module: A module of whose parameters either all ranks keep parts, or none does.
        runtime: The ranks.

    Raises:
        ShardingError: Ranks have built a parameter with different values, or have computed it of parts.
    """
    kept_parts: dict[str, KeptPart] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, OpenParameter):
            _close_parameter(parameter)
        if isinstance(parameter, PartOfParameter):
            kept_parts[clean_name(name)] = _kept_part_of(parameter)
    has_opened_any = _open_parameters.had_any  # perhaps also of layers that were replaced since
    _open_parameters.had_any = False
    if runtime.world_size == 1:
        return
    nan_names = _names_computed_of_parts(module) if has_opened_any else []
    facts = [_PartFacts(kept_part.digest, kept_part.spoiled) for kept_part in kept_parts.values()]
    differs = facts != runtime.broadcast_object(facts)
    is_spoiled = any(kept_part.spoiled for kept_part in kept_parts.values())
    (ranks_with_faults,) = runtime.total([differs or is_spoiled or bool(nan_names)])
    if not ranks_with_faults:
        return
    reports = runtime.gather_objects((facts, nan_names))
    for name in (name for _, names in reports for name in names):
        raise ShardingError(
            f"{name!r} is NaN: it was computed of a parameter that was read after wrap(), and of which each rank keeps "
            f"its part: {_AS_BUILT}.\nRead it before wrap(), call wrap() last; or {_BUILD_WHOLE}."
        )
    for number, name in enumerate(kept_parts):
        facts_by_rank: list[_PartFacts] = [facts_of_rank[number] for facts_of_rank, _ in reports]
        if any(facts_of_rank.spoiled for facts_of_rank in facts_by_rank):
            raise ShardingError(
                f"{name!r} was computed after wrap() from elements that other ranks keep: {_AS_BUILT}.\n"
                f"Give the layer its values first: build it, initialise it, and wrap() it last; {_BUILD_WHOLE}."
            )
        if len({facts_of_rank.digest for facts_of_rank in facts_by_rank}) > 1:
            raise ShardingError(
                f"ranks have built {name!r} with different values, and each has kept its part: {_AS_BUILT}.\n"
                "Where some of its elements were changed after wrap(), call wrap() last. Where ranks draw other random "
                "numbers than torch's, write seed_everything(...) before trainer.fit() or fabric.launch(). Or build it "
                f"with empty_init=True, or {_BUILD_WHOLE}: rank 0's values are taken then."
            )


def _names_computed_of_parts(module: nn.Module) -> list[str]:
    """The names of whole tensors with NaN, which may have been computed from parts whose other elements are NaN."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [clean_name(n) for n, t in tensors if not (is_part(t) or t.is_meta) and t.dtype in _DTYPES and _has_nan(t)]


_AS_BUILT = "layers that are wrapped in configure_model() or under fabric.init_module() are sharded as they are built"
_BUILD_WHOLE = "leave wrap() out and give the strategy auto_wrap_policy={MyBlock}"


def _refuse_reading(parameter: nn.Parameter, name: str) -> Never:
    raise ShardingError(
        f"{name} needs the whole of a parameter of shape {tuple(parameter.shape)}, of which each rank keeps its part: "
        f"{_AS_BUILT}.\nDo it before wrap(), or after the set-up; or {_BUILD_WHOLE}, and every rank builds the whole."
    )


# -- what an operation does to a parameter -----------------------------------------------------------------------------

#: What reads no elements; ``"attribute"`` stands for all attributes that show none.
_READS_NO_VALUES = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_same_size", "is_pinned", "is_shared"),
        *("get_device", "data_ptr", "untyped_storage", "__hash__"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "attribute"),
    ]
)
#: What returns a tensor that may share the parameter's memory, and through which its elements may be written.
_VIEWS = frozenset(
    [
        *("data", "T", "mT", "t", "transpose", "permute", "view", "view_as", "reshape", "flatten", "unflatten"),
        *("__getitem__", "narrow", "select", "chunk", "split", "tensor_split", "unbind", "squeeze", "unsqueeze"),
        *("diagonal", "to", "type", "float", "double", "half", "bfloat16", *devices.CONVERSIONS),
    ]
)
_IN_PLACE = frozenset(
    ["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"]
)


def _name_of(func: Any) -> str:
    """The name of a called function; for attributes, the name if it exposes values, otherwise ``"attribute"``."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(func.__self__, "__name__", ""))
        return attribute if attribute in _VIEWS else "attribute"
    return name


def _may_write(name: str) -> bool:
    return name in _VIEWS or name in _IN_PLACE or (name.endswith("_") and not name.startswith("__"))


def _parts_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, PartOfParameter):
        yield value
    elif isinstance(value, Mapping):
        yield from _parts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts_in(item)


# -- opening and closing -----------------------------------------------------------------------------------------------


def _can_keep_part(parameter: nn.Parameter) -> bool:
    is_on_device = devices.has_addresses(parameter)
    return is_on_device and parameter.dtype in _DTYPES and parameter.ndim > 0 and parameter.numel() > 0


def _kept_part_of(parameter: nn.Parameter) -> KeptPart:
    kept_part: KeptPart = parameter.__dict__[_ATTRIBUTE]
    return kept_part


def _attach_part(parameter: nn.Parameter, kept_part: KeptPart) -> None:
    """Free a parameter's memory, and keep its shape and the part."""
    with without_torch_function():
        nan = torch.full((), torch.nan, dtype=kept_part.part.dtype, device=kept_part.part.device)
        parameter.data = nan.expand(kept_part.shape)
    parameter.__dict__[_ATTRIBUTE] = kept_part
    _set_class(parameter, PartOfParameter)


def _set_class(parameter: nn.Parameter, parameter_class: type[nn.Parameter]) -> None:
    parameter.__class__ = parameter_class


def _open_parameter(parameter: nn.Parameter) -> None:
    """Allocate a parameter's whole memory, for something to write to it."""
    if isinstance(parameter, PartOfParameter):
        kept_part = _kept_part_of(parameter)
        _open_parameters.had_any = True
        parameter.data = kept_part.to_full_shape()
        _mark_as_open(parameter, kept_part)


def _mark_as_open(parameter: nn.Parameter, kept_part: KeptPart) -> None:
    parameter.__dict__[_ATTRIBUTE] = kept_part
    _set_class(parameter, OpenParameter)
    _open_parameters.refs.append(weakref.ref(parameter))


def _close_unused_parameters() -> None:
    """Close the parameters that nothing writes to any more: those whose memory only the parameter itself holds."""
    if not _open_parameters.refs:
        return
    still_open: list[weakref.ref[nn.Parameter]] = []
    for ref in _open_parameters.refs:
        parameter = ref()
        if parameter is not None and isinstance(parameter, OpenParameter):
            if users_of_storage(parameter) == 1:
                _close_parameter(parameter)
            else:
                still_open.append(ref)
    _open_parameters.refs = still_open
    give_back()


def _close_parameter(parameter: OpenParameter) -> None:
    before = _kept_part_of(parameter)
    flat = parameter.detach().reshape(-1)
    part = _range_of(flat, before.rank, before.ranks).clone()
    digest = before.digest
    if not _has_nan(flat):
        digest = _digest(flat)
    elif part.dtype != before.part.dtype or _has_writes(flat, part, before):
        # The change must have been elementwise. Ranks agree on it if they have agreed before, and on random numbers.
        digest = f"{digest}, changed at {_digest(torch.get_rng_state())}"
    spoiled = before.spoiled or (_has_nan(part) and not _has_nan(before.part))
    _attach_part(parameter, replace(before, shape=parameter.shape, part=part, digest=digest, spoiled=spoiled))


def _has_writes(flat: Tensor, part: Tensor, before: KeptPart) -> bool:
    """Whether anything was written, including to other ranks' elements, which are NaN until written."""
    nan_of_others = int(flat.isnan().sum()) - int(part.isnan().sum())
    has_filled_others = nan_of_others < flat.numel() - part.numel()
    return has_filled_others or not torch.equal(part, before.part.to(part.device))


def _length(count: int, ranks: int) -> int:
    """The number of elements that a rank keeps; the last ranks may keep fewer, or none."""
    return -(-count // ranks)


def _range_of(flat: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's range of a flat tensor, as a view."""
    length = _length(flat.numel(), ranks)
    return flat[length * rank :][:length]


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and bool(tensor.detach().amax().isnan())  # without allocating a mask


def _digest(flat: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memory_of(flat.cpu().contiguous()))
