"""Builds a model on the meta device, and replays what its constructor did when a part of it is materialised."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp_core.devices import random_state, set_random_state
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_random import Draw, Draws
from fsdp_core.state.host_memory import give_back
from fsdp_core.torch_private.tensors import TorchDispatchMode, skipped_initialiser, tree_flatten, tree_map

__all__ = ["continue_deferred", "deferred_init", "has_values", "is_deferred", "values_of", "was_changed"]


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which modules are built on the meta device, and the initialisation of their tensors is recorded.

    Everything that constructors do to tensors is recorded: ``reset_parameters``, ``self.apply(self._init_weights)``,
    computed values. :func:`values_of` replays it with real memory, as little as the requested tensors need, and draws
    random numbers in the order in which building the whole model would have drawn them.

    Example:
        >>> with deferred_init():
        ...     layer = nn.Linear(2, 1)
        >>> layer.weight.is_meta
        True
        >>> _ = torch.manual_seed(0)
        >>> (bias,) = values_of([layer.bias], torch.device("cpu"))
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(bias, nn.Linear(2, 1).bias)
        True
    """
    last: _Build | None = getattr(_thread, "last", lambda: None)()
    build = last if last is not None and last.draws.is_continued() else _Build()
    _thread.last = weakref.ref(build)
    with _recording(build):
        yield


@contextmanager
def continue_deferred(module: nn.Module) -> Iterator[None]:
    """A context in which further changes to a module from :func:`deferred_init` are recorded, such as another dtype."""
    builds = [_record_of(tensor)[0] for tensor in (*module.parameters(), *module.buffers()) if is_deferred(tensor)]
    with _recording(builds[0]) if builds else nullcontext():
        yield


def is_deferred(tensor: Tensor) -> bool:
    """Whether the initialisation of a tensor on the meta device is recorded."""
    return tensor.is_meta and hasattr(tensor.untyped_storage(), _BUILD)


def has_values(tensor: Tensor) -> bool:
    """Whether a recorded operation has filled a tensor on the meta device."""
    if not is_deferred(tensor):
        return False
    build, storage_id = _record_of(tensor)
    return storage_id in build.written_ids


def was_changed(tensor: Tensor) -> bool:
    """Whether a tensor from :func:`deferred_init` was changed without a record, so that the change had no effect."""
    build, storage_id = _record_of(tensor)
    return tensor._version > build.changes.get(storage_id, 0)


def values_of(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Replay the recorded initialisation of tensors on the meta device. Tensors that share memory still do afterwards.

    Args:
        tensors: Tensors for which :func:`is_deferred` is true.
        device: The device to allocate on, whose random-number generator is used.

    Returns:
        Their values, NaN where no recorded operation has filled them.
    """
    requests = [(_record_of(tensor)[0], _View.of(tensor)) for tensor in tensors]
    builds = list(dict.fromkeys(build for build, _ in requests))
    memory = {
        build: build.replay({view.storage_id for owner, view in requests if owner is build}, device) for build in builds
    }
    return [memory[build].tensor(view) for build, view in requests]


_thread = threading.local()
_BUILD = "_fsdp_core_build"
_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Bytes that are freed before they are returned to the system.
_FREE_EVERY_BYTES = 2**24
_EMPTY_OPERATIONS = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_READING_METHODS = frozenset(
    (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__)
    + (Tensor.__index__, Tensor.__contains__)
)


def _record_of(tensor: Tensor) -> tuple[_Build, int]:
    """Return the build that a tensor is of, and the number of its storage in the build."""
    record: tuple[_Build, int] = getattr(tensor.untyped_storage(), _BUILD)
    return record


def _allow_change(tensor: Tensor, uncounted: int) -> None:
    """Let :func:`was_changed` not count an in-place change that is recorded.

    Args:
        tensor: The tensor.
        uncounted: How many changes torch will count after this call.
    """
    build, storage_id = _record_of(tensor)
    build.changes[storage_id] = max(build.changes.get(storage_id, 0), tensor._version) + uncounted


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a view of a storage."""

    storage_id: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        _, storage_id = _record_of(tensor)
        return cls(storage_id, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@dataclass(slots=True, kw_only=True)
class _Step:
    """A recorded operation, with views instead of tensors.

    Attributes:
        func: The operation.
        arguments: Its positional and keyword arguments.
        reads: The storages whose values it needs.
        writes: Those that it writes to.
        returned: The tensors that it returns.
        fills: Whether it overwrites all of one tensor, and writes to no other.
        draw: The random numbers that it draws.
    """

    func: Callable[..., Any]
    arguments: tuple[Any, dict[str, Any]]
    reads: frozenset[int]
    writes: frozenset[int]
    returned: list[_View]
    fills: bool
    draw: Draw | None


class _Memory:
    """Real storages for the recorded ones, in which steps are replayed."""

    def __init__(self, sizes: list[tuple[int, torch.dtype]], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, view: _View) -> Tensor:
        if view.storage_id not in self._storages:
            size, dtype = self._sizes[view.storage_id]
            new = torch.zeros(size // dtype.itemsize, dtype=dtype, device=self._device)
            # NaN marks unfilled memory, if the dtype has it
            if dtype.is_floating_point:
                new.fill_(torch.nan)
            self._storages[view.storage_id] = new.untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device=self._device)
        return empty.set_(self._storages[view.storage_id], view.offset, view.size, view.stride)

    def run(self, step: _Step) -> None:
        args, kwargs = tree_map(self._to_real, step.arguments)
        for view, value in zip(step.returned, _tensors_in(step.func(*args, **kwargs)), strict=True):
            if view.storage_id not in self._storages:
                size, _ = self._sizes[view.storage_id]
                has_same_layout = (tuple(value.stride()), value.storage_offset()) == (view.stride, view.offset)
                if has_same_layout and value.untyped_storage().nbytes() == size:
                    self._storages[view.storage_id] = value.untyped_storage()
                else:
                    self.tensor(view).copy_(value)

    def _to_real(self, value: Any) -> Any:
        if isinstance(value, _View):
            return self.tensor(value)
        if isinstance(value, Tensor):
            return value.to(self._device)
        return self._device if value == _META else value


class _Build:
    """The record of a context. The storages of its tensors keep it alive, and it keeps none of them alive."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.sizes: list[tuple[int, torch.dtype]] = []  # the size in bytes and the dtype of each storage
        self.written_ids: set[int] = set()  # the numbers of the storages that a step writes to
        self.changes: dict[int, int] = {}  # by storage, how many changes in place are recorded
        self.draws = Draws()
        self._drawn: dict[str, int] = {}  # by device type, for how many steps numbers were drawn in order

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, *, out: Any, targets: list[Tensor]) -> None:
        """Record an operation that has returned ``out``, and has written to ``targets``, on the meta device."""
        returned, input_tensors = _tensors_in(out), _tensors_in((args, kwargs))
        new = [tensor for tensor in returned if not is_deferred(tensor)]
        for tensor in new:
            storage: Any = tensor.untyped_storage()
            if not hasattr(storage, _BUILD):
                setattr(storage, _BUILD, (self, len(self.sizes)))
                self.sizes.append((storage.nbytes(), tensor.dtype))
        for tensor in targets:
            _allow_change(tensor, 1)
        name = getattr(func, "_opname", None)
        targets = [t for t in (*targets, *new) if _record_of(t)[0] is self]
        if not targets or name in _EMPTY_OPERATIONS:
            return
        random = name is None or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        is_alone = len(input_tensors) == len(targets) == 1 and input_tensors[0] is targets[0]
        fills = is_alone and (random or name in ("zero_", "fill_"))
        writes = frozenset(_record_of(t)[1] for t in targets)
        reads = frozenset(_record_of(t)[1] for t in input_tensors if is_deferred(t) and _record_of(t)[0] is self)
        self.written_ids |= writes
        self.steps.append(
            _Step(
                func=func,
                arguments=tree_map(self._to_recorded, (args, kwargs)),
                reads=reads - writes if fills else reads,
                writes=writes,
                returned=[_View.of(tensor) for tensor in returned],
                fills=fills and targets[0].numel() * targets[0].itemsize == self.sizes[_record_of(targets[0])[1]][0],
                draw=self.draws.record(kwargs.get("generator")) if random else None,
            )
        )

    def _to_recorded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_deferred(value):
            return _View.of(value) if _record_of(value)[0] is self else read_now(value)
        return value.detach().clone()  # it may be changed later

    def replay(self, storage_ids: Collection[int], device: torch.device) -> _Memory:
        """Replay all steps that the values of some storages depend on."""
        self._find_random_states(device)
        return self._replay_until(storage_ids, device, len(self.steps))

    def _replay_until(self, storage_ids: Collection[int], device: torch.device, until: int) -> _Memory:
        needed = set(storage_ids)
        chosen = list[_Step]()
        for step in reversed(self.steps[:until] if needed else ()):
            if not needed.isdisjoint(step.writes):
                chosen.append(step)
                needed -= step.writes if step.fills else frozenset()
                needed |= step.reads
        memory = _Memory(self.sizes, device)
        with torch.no_grad():
            for step in reversed(chosen):
                with nullcontext() if step.draw is None else step.draw.drawing_again(device):
                    memory.run(step)
        return memory

    def _find_random_states(self, device: torch.device) -> None:
        """Draw all random numbers once, in order, to find the generator's state before each step."""
        first = self._drawn.get(device.type, 0)
        self._drawn[device.type] = len(self.steps)
        freed = 0
        with self.draws.drawing_in_order(device), torch.no_grad():
            for index in range(first, len(self.steps)):
                step = self.steps[index]
                if step.draw is not None:
                    needed = self._replay_until(step.reads, device, index)
                    with step.draw.drawing_first(device):
                        needed.run(step)
                    del needed
                    freed += sum(self.sizes[storage_id][0] for storage_id in step.writes)
                    if freed > _FREE_EVERY_BYTES:  # the allocator may keep it without using it again
                        give_back()
                        freed = 0


def read_now(tensor: Tensor) -> Tensor:
    """The value of a tensor from :func:`deferred_init`, read before its module is materialised."""
    before = random_state(_CPU)
    try:
        return values_of([tensor], _CPU)[0]
    finally:
        set_random_state(_CPU, before)


@contextmanager
def _recording(build: _Build) -> Iterator[None]:
    if getattr(_thread, "recording", False):
        yield
        return
    _thread.recording = True
    try:
        with _ReadingMode(), _RecordingMode(build):
            yield
    finally:
        _thread.recording = False


@contextmanager
def _without_recording() -> Iterator[None]:
    _thread.recording = False
    try:
        yield
    finally:
        _thread.recording = True


class _ReadingMode(TorchFunctionMode):
    """Returns values where control flow needs them, and records what torch skips for tensors on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and is_deferred(args[0]):
            if func in _READING_METHODS:
                with _without_recording():
                    return func(read_now(args[0]), *args[1:], **(kwargs or {}))
            initialiser = skipped_initialiser(func)
            if initialiser is not None and _thread.recording:
                initialise, arguments = initialiser
                build, _ = _record_of(args[0])
                with _without_recording():
                    build.record(initialise, (), arguments, out=args[0], targets=[args[0]])
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is Tensor.data and is_deferred(args[0]):
            _allow_change(args[0], 0)  # torch counts an assignment to its data, which has an effect without a record
        return out


class _RecordingMode(TorchDispatchMode):
    """Runs operations on the meta device, and records them."""

    def __init__(self, build: _Build) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _thread.recording:
            return func(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        schema_arguments = {a.name: a for a in func._schema.arguments}
        random = torch.Tag.nondeterministic_seeded in func.tags
        targets: list[Tensor] = []  # what the operator writes to
        for position, (name, argument) in enumerate(schema_arguments.items()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                targets += _tensors_in(args[position] if position < len(args) else kwargs.get(name))
        if any(not tensor.is_meta for tensor in targets):
            if random:
                raise ShardingError(
                    "random numbers are drawn into a tensor made of data (torch.tensor([...]), numpy), in a model that "
                    "is built with empty_init=True: they would not be those that it has without.\n"
                    "Write torch.empty(...) or torch.zeros(...) for that tensor, or build the model without empty_init."
                )
            return func(*tree_map(_with_values, args), **tree_map(_with_values, kwargs))
        if tensors and not random and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        is_device_inherited = "device" not in kwargs and any(tensor.is_meta for tensor in tensors)
        if "device" in schema_arguments and not is_device_inherited:
            kwargs["device"] = _META
        try:
            out = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except NotImplementedError:  # the size of the result depends on values
            kwargs.pop("device", None)
            return func(*tree_map(_with_values, args), **tree_map(_with_values, kwargs))
        build = _record_of(targets[0])[0] if targets and is_deferred(targets[0]) else self._build
        build.record(func, args, kwargs, out=out, targets=targets)
        return out


def _with_values(value: Any) -> Any:
    return read_now(value) if isinstance(value, Tensor) and is_deferred(value) else value


def _on_meta(value: Any) -> Any:
    return value.to(_META) if isinstance(value, Tensor) else value
