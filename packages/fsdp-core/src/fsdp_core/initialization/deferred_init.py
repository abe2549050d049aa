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

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_random import Draw, Draws, random_state, set_random_state
from fsdp_core.state.host_memory import give_back
from fsdp_core.torch_private import TorchDispatchMode, skipped_initialiser, tree_flatten, tree_map

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
    last: _Build | None = getattr(_thread, "last", _no_build)()
    build = last if last is not None and last.draws.is_continued() else _Build()
    _thread.last = weakref.ref(build)
    with _noting(build):
        yield


@contextmanager
def continue_deferred(module: nn.Module) -> Iterator[None]:
    """A context in which further changes to a module from :func:`deferred_init` are recorded, such as another dtype."""
    builds = [_noted(tensor)[0] for tensor in (*module.parameters(), *module.buffers()) if is_deferred(tensor)]
    with _noting(builds[0]) if builds else nullcontext():
        yield


def is_deferred(tensor: Tensor) -> bool:
    """Whether the initialisation of a tensor on the meta device is recorded."""
    return tensor.is_meta and hasattr(tensor.untyped_storage(), _BUILD)


def has_values(tensor: Tensor) -> bool:
    """Whether a recorded operation has filled a tensor on the meta device."""
    if not is_deferred(tensor):
        return False
    build, place = _noted(tensor)
    return place in build.written


def was_changed(tensor: Tensor) -> bool:
    """Whether a tensor from :func:`deferred_init` was changed without a record, so that the change had no effect."""
    build, place = _noted(tensor)
    return tensor._version > build.changes.get(place, 0)


def values_of(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Replay the recorded initialisation of tensors on the meta device. Tensors that share memory still do afterwards.

    Args:
        tensors: Tensors for which :func:`is_deferred` is true.
        device: The device to allocate on, whose random-number generator is used.

    Returns:
        Their values, NaN where nothing was noted that has filled them.
    """
    found = [(_noted(tensor)[0], _View.of(tensor)) for tensor in tensors]
    builds = list(dict.fromkeys(build for build, _ in found))
    memory = {one: one.redone({view.place for build, view in found if build is one}, device) for one in builds}
    return [memory[build].tensor(view) for build, view in found]


def _no_build() -> None:
    return None


_thread = threading.local()
_BUILD = "_fsdp_core_build"
_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Bytes that are freed before they are given back to the system.
_GIVEN_BACK_EVERY = 2**24
_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_READS = frozenset(
    (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__)
    + (Tensor.__index__, Tensor.__contains__)
)


def _noted(tensor: Tensor) -> tuple[_Build, int]:
    noted: tuple[_Build, int] = getattr(tensor.untyped_storage(), _BUILD)
    return noted


def _allow(tensor: Tensor, more: int) -> None:
    """Record an in-place change, which torch may count before or after: this one is allowed, later ones are not."""
    build, place = _noted(tensor)
    build.changes[place] = max(build.changes.get(place, 0), tensor._version) + more


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, Tensor)]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a view of a storage."""

    place: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        _, place = _noted(tensor)
        return cls(place, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@dataclass(slots=True, kw_only=True)
class _Step:
    """A recorded operation, with views instead of tensors.

    Attributes:
        func: The operation.
        given: Its arguments.
        reads: The storages whose values it needs.
        writes: Those that it writes to.
        returned: The tensors that it gives.
        fills: Whether it writes to one tensor alone, the whole of it, whatever was in it.
        draw: The random numbers that it draws.
    """

    func: Callable[..., Any]
    given: tuple[Any, dict[str, Any]]
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
        if view.place not in self._storages:
            size, dtype = self._sizes[view.place]
            new = torch.zeros(size // dtype.itemsize, dtype=dtype, device=self._device)
            # NaN marks unfilled memory, if the dtype has it
            self._storages[view.place] = (new.fill_(torch.nan) if dtype.is_floating_point else new).untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device=self._device)
        return empty.set_(self._storages[view.place], view.offset, view.size, view.stride)

    def do(self, step: _Step) -> None:
        args, kwargs = tree_map(self._given, step.given)
        for view, value in zip(step.returned, _tensors(step.func(*args, **kwargs)), strict=True):
            if view.place not in self._storages:
                size, _ = self._sizes[view.place]
                same = (tuple(value.stride()), value.storage_offset()) == (view.stride, view.offset)
                if same and value.untyped_storage().nbytes() == size:
                    self._storages[view.place] = value.untyped_storage()
                else:
                    self.tensor(view).copy_(value)

    def _given(self, one: Any) -> Any:
        if isinstance(one, _View):
            return self.tensor(one)
        if isinstance(one, Tensor):
            return one.to(self._device)
        return self._device if one == _META else one


class _Build:
    """The record of a context. The storages of its tensors keep it alive, and it keeps none of them alive."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.sizes: list[tuple[int, torch.dtype]] = []
        self.written: set[int] = set()
        self.changes: dict[int, int] = {}  # in place, by storage
        self.draws = Draws()
        self._drawn: dict[str, int] = {}

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any, written: list[Tensor]) -> None:
        """Record an operation that has returned, or written to, tensors on the meta device."""
        returned, given = _tensors(out), _tensors((args, kwargs))
        new = [tensor for tensor in returned if not is_deferred(tensor)]
        for tensor in new:
            storage: Any = tensor.untyped_storage()
            if not hasattr(storage, _BUILD):
                setattr(storage, _BUILD, (self, len(self.sizes)))
                self.sizes.append((storage.nbytes(), tensor.dtype))
        for tensor in written:
            _allow(tensor, 1)
        name = getattr(func, "_opname", None)
        written = [t for t in (*written, *new) if _noted(t)[0] is self]
        if not written or name in _EMPTY:
            return
        random = name is None or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        fills = len(given) == len(written) == 1 and given[0] is written[0] and (random or name in ("zero_", "fill_"))
        writes = frozenset(_noted(t)[1] for t in written)
        reads = frozenset(_noted(t)[1] for t in given if is_deferred(t) and _noted(t)[0] is self)
        self.written |= writes
        self.steps.append(
            _Step(
                func=func,
                given=tree_map(self._held, (args, kwargs)),
                reads=reads - writes if fills else reads,
                writes=writes,
                returned=[_View.of(tensor) for tensor in returned],
                fills=fills and written[0].numel() * written[0].itemsize == self.sizes[_noted(written[0])[1]][0],
                draw=self.draws.note(kwargs.get("generator")) if random else None,
            )
        )

    def _held(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if is_deferred(one):
            return _View.of(one) if _noted(one)[0] is self else value_now(one)
        return one.detach().clone()  # it may be changed later

    def redone(self, places: Collection[int], device: torch.device) -> _Memory:
        """Replay all steps that the values of some storages depend on."""
        self._draw_all(device)
        return self._redo(places, device, len(self.steps))

    def _redo(self, places: Collection[int], device: torch.device, until: int) -> _Memory:
        needed, chosen = set(places), list[_Step]()
        for step in reversed(self.steps[:until] if needed else ()):
            if not needed.isdisjoint(step.writes):
                chosen.append(step)
                needed -= step.writes if step.fills else frozenset()
                needed |= step.reads
        memory = _Memory(self.sizes, device)
        with torch.no_grad():
            for step in reversed(chosen):
                with nullcontext() if step.draw is None else step.draw.again(device):
                    memory.do(step)
        return memory

    def _draw_all(self, device: torch.device) -> None:
        """Draw all random numbers once, in order, to find the generator's state before each step."""
        first, self._drawn[device.type] = self._drawn.get(device.type, 0), len(self.steps)
        freed = 0
        with self.draws.continued(device), torch.no_grad():
            for index in range(first, len(self.steps)):
                step = self.steps[index]
                if step.draw is not None:
                    needed = self._redo(step.reads, device, index)
                    with step.draw.first(device):
                        needed.do(step)
                    del needed
                    freed += sum(self.sizes[place][0] for place in step.writes)
                    if freed > _GIVEN_BACK_EVERY:  # the allocator does not always use it again
                        give_back()
                        freed = 0


def value_now(tensor: Tensor) -> Tensor:
    """The value of a tensor from :func:`deferred_init`, read before its module is materialised."""
    before = random_state(_CPU)
    try:
        return values_of([tensor], _CPU)[0]
    finally:
        set_random_state(_CPU, before)


@contextmanager
def _noting(build: _Build) -> Iterator[None]:
    if getattr(_thread, "noting", False):
        yield
        return
    _thread.noting = True
    try:
        with _Reads(), _Operations(build):
            yield
    finally:
        _thread.noting = False


@contextmanager
def _paused() -> Iterator[None]:
    _thread.noting = False
    try:
        yield
    finally:
        _thread.noting = True


class _Reads(TorchFunctionMode):
    """Returns values where control flow needs them, and records what torch skips for tensors on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and is_deferred(args[0]):
            if func in _READS:
                with _paused():
                    return func(value_now(args[0]), *args[1:], **(kwargs or {}))
            initialiser = skipped_initialiser(func)
            if initialiser is not None and _thread.noting:
                with _paused():
                    _noted(args[0])[0].note(initialiser[0], (), initialiser[1], args[0], [args[0]])
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is Tensor.data and is_deferred(args[0]):
            _allow(args[0], 0)  # another tensor may have replaced its data
        return out


class _Operations(TorchDispatchMode):
    """Runs operations on the meta device, and records them."""

    def __init__(self, build: _Build) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _thread.noting:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        arguments = {a.name: a for a in func._schema.arguments}
        random = torch.Tag.nondeterministic_seeded in func.tags
        written = [
            tensor
            for position, (name, argument) in enumerate(arguments.items())
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name))
        ]
        if any(not tensor.is_meta for tensor in written):
            if random:
                raise ShardingError(
                    "random numbers are drawn into a tensor made of data (torch.tensor([...]), numpy), in a model that "
                    "is built with empty_init=True: they would not be those that it has without.\n"
                    "Write torch.empty(...) or torch.zeros(...) for that tensor, or build the model without empty_init."
                )
            return func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if given and not random and not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        if "device" in arguments and ("device" in kwargs or not given or not any(t.is_meta for t in given)):
            kwargs["device"] = _META
        try:
            out = func(*tree_map(_empty, args), **tree_map(_empty, kwargs))
        except NotImplementedError:  # the size of the result depends on values
            kwargs.pop("device", None)
            return func(*tree_map(_real, args), **tree_map(_real, kwargs))
        build = _noted(written[0])[0] if written and is_deferred(written[0]) else self._build
        build.note(func, args, kwargs, out, written)
        return out


def _real(one: Any) -> Any:
    return value_now(one) if isinstance(one, Tensor) and is_deferred(one) else one


def _empty(one: Any) -> Any:
    return one.to(_META) if isinstance(one, Tensor) else one
