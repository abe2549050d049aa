"""The memory of one step: every storage that tensors had, with what it held, from its allocation until it was freed.

The mode sees operations on real, fake and meta tensors alike, so one code measures a rehearsal and a real run.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.rehearsal.collectives import Collective, collective_of
from fsdp_core.torch_private.fake_tensors import active_fake_mode, tree_leaves
from fsdp_core.torch_private.flops import flops_of
from fsdp_core.torch_private.tensors import TorchDispatchMode, is_fake

__all__ = ["Content", "MemoryMode", "Peak", "Phase", "StepRecord", "plain_tensors"]

#: What a storage holds.
Content: TypeAlias = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "activations",
    "gathered parameters",
    "communication",
    "backward",
    "optimizer step",
    "batch",
    "other",
]

Phase: TypeAlias = Literal["set-up", "forward", "backward", "optimizer", "between"]

#: What is allocated in a phase, unless something says otherwise.
_CONTENT_OF_PHASE: dict[Phase, Content] = {
    "set-up": "other",
    "forward": "activations",
    "backward": "backward",
    "optimizer": "optimizer step",
    "between": "other",
}


@dataclass(eq=False, slots=True)
class Allocation:
    """A storage.

    Attributes:
        content: What it holds. Known better later than when it is allocated: a gradient is a tensor of the backward
            pass until a parameter has it.
        device: The kind of its device.
        nbytes: Its bytes now; 0 after it was freed.
        module: The unit in whose computation it was allocated; empty outside of units.
    """

    content: Content
    device: str
    nbytes: int
    module: str


@dataclass(frozen=True, slots=True)
class Change:
    """A storage that was allocated, resized or freed.

    Attributes:
        operation: The number of operations before.
        phase: The phase.
        module: The unit that was computing, by name; empty outside of units.
        allocation: The storage.
        delta: How many bytes it has more than before.
    """

    operation: int
    phase: Phase
    module: str
    allocation: Allocation
    delta: int


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment when most bytes were live.

    Attributes:
        nbytes: The bytes.
        by_content: The bytes by what they hold, the largest first.
        phase: The phase.
        module: The unit that was computing, by name; empty outside of units.
        operation: The number of operations before.
    """

    nbytes: int
    by_content: dict[Content, int]
    phase: Phase
    module: str
    operation: int


@dataclass
class StepRecord:
    """What happened in one step.

    Attributes:
        start: The storages that were live before it, with their bytes then.
        changes: What was allocated, resized and freed in it, in order.
        collectives: The collectives, in order.
        operations: The number of operations.
        flops: The floating-point operations of its matrix products, convolutions and attention.
    """

    start: list[tuple[Allocation, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    operations: int = 0
    flops: int = 0

    def peak(self, device: str) -> Peak:
        """The moment when most bytes on a kind of device were live.

        Args:
            device: The kind, such as ``"cpu"``.
        """
        live = sum(nbytes for allocation, nbytes in self.start if allocation.device == device)
        most, after = live, 0
        for index, change in enumerate(self.changes, start=1):
            if change.allocation.device == device:
                live += change.delta
                if live > most:
                    most, after = live, index
        by_content = self._contents_after(after, device)
        last = self.changes[after - 1] if after else None
        return Peak(
            nbytes=most,
            by_content=dict(by_content.most_common()),
            phase="between" if last is None else last.phase,
            module="" if last is None else last.module,
            operation=0 if last is None else last.operation,
        )

    def _contents_after(self, count: int, device: str) -> Counter[Content]:
        """The live bytes by content, after so many of the changes."""
        live: Counter[Content] = Counter()
        for allocation, nbytes in self.start:
            if allocation.device == device:
                live[allocation.content] += nbytes
        for change in self.changes[:count]:
            if change.allocation.device == device:
                live[change.allocation.content] += change.delta
        return +live

    def curve(self, device: str) -> Iterator[tuple[int, Phase, str, dict[Content, int]]]:
        """The live bytes by content over the step: the operation, its phase and unit, and the bytes after each change.

        Args:
            device: The kind of device, such as ``"cpu"``.
        """
        live = self._contents_after(0, device)
        yield 0, "between", "", dict(live)
        for change in self.changes:
            if change.allocation.device == device:
                live[change.allocation.content] += change.delta
                yield change.operation, change.phase, change.module, dict(live)


class MemoryMode(TorchDispatchMode):
    """Follows the storages of all tensors that operations return, while it is entered.

    Attributes:
        phase: The phase of the run.
        module: The unit that computes, by name; empty outside of units.
        recomputing: Whether a unit runs its forward pass within the backward pass, so that it allocates activations.
        step: The record of the current step.
    """

    def __init__(self, *, reduces_in_a_copy: bool = False) -> None:
        """Make the mode.

        Args:
            reduces_in_a_copy: Whether a reduce-scatter allocates as much as its input while it runs, as gloo's does.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "set-up"
        self.module = ""
        self.recomputing = False
        self.step = StepRecord()
        self._record = self.step
        self._reduces_in_a_copy = reduces_in_a_copy
        self._allocations: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._contexts = ExitStack()
        self._fake_mode: Any = None

    def begin_step(self) -> None:
        """Begin a new record, with what is live now."""
        live = [allocation for allocation in self._allocations.values() if allocation.nbytes]
        self.step = self._record = StepRecord(start=[(allocation, allocation.nbytes) for allocation in live])

    def end_step(self) -> None:
        """Leave the record as it is, whatever happens from now on."""
        self._record = StepRecord()

    def take(self, tensors: Iterable[Tensor], content: Content) -> None:
        """Note what tensors hold, whose storages may be known already.

        Args:
            tensors: The tensors.
            content: What they hold.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self._meet(plain, content)

    # -- storages --------------------------------------------------------------------------------------------------

    def _meet(self, tensor: Tensor, content: Content | None = None, *, is_view: bool = False) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor, or one of a wrapper class, has none
            return
        allocation = self._allocations.get(storage)
        if allocation is None:
            if content is None:
                content = "activations" if self.recomputing else _CONTENT_OF_PHASE[self.phase]
            allocation = Allocation(content, tensor.device.type, 0, self.module)
            self._allocations[storage] = allocation
            # the finalizer keeps the allocation alive, not the storage
            weakref.finalize(storage, self._resize, allocation, 0).atexit = False
        elif content is not None:
            allocation.content = content
        elif is_view and storage.nbytes() > allocation.nbytes:
            # the fake mode's cache lays out a view by set_(), which refills a storage that a library has freed
            storage.resize_(allocation.nbytes)
        self._resize(allocation, storage.nbytes())

    def _resize(self, allocation: Allocation, nbytes: int) -> None:
        delta = nbytes - allocation.nbytes
        if delta:
            allocation.nbytes = nbytes
            self._record.changes.append(Change(self._record.operations, self.phase, self.module, allocation, delta))

    def _resized(self, storage: UntypedStorage) -> None:
        """Follow a storage that is resized by itself: a library frees and refills gathered parameters so."""
        allocation = self._allocations.get(storage)
        if allocation is not None:
            allocation.content = "gathered parameters"
            self._resize(allocation, storage.nbytes())

    # -- operations ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._fake_mode = active_fake_mode()
        self._contexts.enter_context(_resizing_noticed(self._resized))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._contexts.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # its operations on local tensors come here
        result = func(*args, **(kwargs or {}))
        if self._fake_mode is not active_fake_mode():
            return result  # computed for real in between, on values that a rehearsal knows
        self._record.operations += 1
        self._record.flops += flops_of(func, args, kwargs or {}, result)
        collective = collective_of(func, args, result)
        if collective is not None:
            self._communicate(collective, result)
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor, is_view=func.is_view)
        return result

    def _communicate(self, collective: Collective, result: Any) -> None:
        self._record.collectives.append(collective)
        for tensor in collective.received:
            self._meet(tensor, None if self.phase == "optimizer" else "communication")
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        collective.received = ()
        if self._reduces_in_a_copy and collective.name == "reduce-scatter":
            copy = Allocation("communication", collective.device, 0, self.module)
            self._resize(copy, collective.nbytes)
            self._resize(copy, 0)


class _ResizingNoticed(AbstractContextManager[None]):
    def __init__(self, notice: Callable[[UntypedStorage], None]) -> None:
        self._notice = notice
        self._original = UntypedStorage.resize_

    def __enter__(self) -> None:
        original, notice = self._original, self._notice

        @functools.wraps(original)
        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            notice(storage)
            return result

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def __exit__(self, *error: object) -> None:
        UntypedStorage.resize_ = self._original  # type: ignore[method-assign]


_resizing_noticed = _ResizingNoticed


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own inside a tensor of a wrapper class; the tensor itself, if it is none.

    Args:
        tensor: Any tensor.
    """
    if isinstance(tensor, DTensor):
        yield from plain_tensors(local_tensor(tensor.detach()))
    elif hasattr(tensor, "__tensor_flatten__") and not is_fake(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor
