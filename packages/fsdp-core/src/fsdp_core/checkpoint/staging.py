"""Copies of the tensors that a rank saves, in host memory that is reused from save to save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_core import devices
from fsdp_core.checkpoint.fingerprints import differing, sample, view_of_sample
from fsdp_core.checkpoint.planning import Plan
from fsdp_core.errors import CheckpointError
from fsdp_core.state.boxes import row_major_strides
from fsdp_core.torch_private.dtensors import call_before_parts, forget_call_before_parts
from fsdp_core.torch_private.tensors import times_written

__all__ = ["Staging"]

# A power of two, because torch's pinned-memory allocator rounds up to one.
_BLOCK_BYTES = 512 * 2**20
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class _Deferred:
    """A tensor that is copied later.

    Attributes:
        name: The tensor's path in the state.
        memory: The host memory that it is copied to.
        original: The tensor.
        counted_tensors: Tensors that share its memory, and count writes to it.
        write_count: The number of writes when the copy was deferred.
        sample_before: Some of its elements at that time, since writes through ``.data`` are not counted.
    """

    name: str
    memory: Tensor
    original: Tensor
    counted_tensors: Sequence[Tensor]
    write_count: int
    sample_before: Tensor


class Staging:
    """Host memory for one rank's part of a state; pinned if the state is on accelerators.

    It grows to the size of the largest save, and is reused by the next one.

    Example:
        >>> weight = torch.ones(2)
        >>> staging = Staging()
        >>> copy = staging.copy(Plan(tensors={"weight": weight}), rank=0)
        >>> _ = weight.zero_()
        >>> staging.wait()
        >>> copy.tensors["weight"].tolist()
        [1.0, 1.0]
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._is_pinned = False
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._memory_of_layout: list[Tensor] = []
        self._views: dict[int, Tensor] = {}  # views of the samples in copies, by the id of the copy's memory
        self._copy_events: list[torch.Event] = []
        self._lock = threading.Lock()  # guards the attributes below
        self._deferred: list[_Deferred] = []
        self._changed_names: list[str] = []

    def copy(
        self, plan: Plan, rank: int, *, deferred: Callable[[Tensor], Sequence[Tensor] | None] | None = None
    ) -> Plan:
        """Copy the tensors of a plan that ``rank`` writes. Copies of the previous plan must no longer be in use.

        Copies from an accelerator are asynchronous, on its current stream, so later work on the stream doesn't change
        them.

        Args:
            plan: The plan.
            rank: This rank. Only rank 0 writes the tensors of the plain data.
            deferred: Which tensors in host memory are copied by :meth:`finish` instead: returns the tensors that
                count writes to one, such as the DTensor that it belongs to, or ``None`` to copy it now. They
                must not be written to until then: :meth:`wait` raises if torch has counted a write, or if elements
                that :func:`~fsdp_core.checkpoint.fingerprints.sample` looks at have changed, as through ``.data``.

        Returns:
            The plan over the copies, which may be read after :meth:`wait`. A tensor that is read only when it is
            written (:class:`~fsdp_core.state.TensorSource`) is not copied.
        """
        originals = [data for _, data in _named_chunks(plan)]
        if rank == 0:
            originals += plan.tensors.values()
        identities = [_identity(tensor) for tensor in originals]
        originals_by_identity = dict(zip(identities, originals, strict=True))
        memory_of = dict(zip(originals_by_identity, self._memory_for([*originals_by_identity.values()]), strict=True))
        name_of_tensor = {} if deferred is None else {id(data): name for name, data in _named_chunks(plan)}
        deferred_copies = []
        with torch.no_grad():
            for identity, original in originals_by_identity.items():
                counted_tensors: Sequence[Tensor] | None = None
                if deferred is not None and original.device.type == "cpu":
                    counted_tensors = deferred(original)
                if counted_tensors is not None:
                    deferred_copies.append(
                        _Deferred(
                            name=name_of_tensor.get(id(original), "a tensor"),
                            memory=memory_of[identity],
                            original=original.detach(),  # keeps this memory if the user gives the tensor another
                            counted_tensors=counted_tensors,
                            write_count=sum(map(times_written, counted_tensors)),
                            sample_before=sample(original),
                        )
                    )
                else:
                    memory_of[identity].copy_(original, non_blocking=devices.is_accelerator(original.device))
        with self._lock:
            self._deferred = deferred_copies
            self._changed_names = []
        if deferred_copies:
            call_before_parts(self.finish)
        copies = {id(tensor): memory_of[identity] for tensor, identity in zip(originals, identities, strict=True)}
        source_devices = {tensor.device for tensor in originals_by_identity.values()}
        self._copy_events = [
            devices.record_event(device) for device in source_devices if devices.is_accelerator(device)
        ]
        return replace(
            plan,
            stored={key: tensor.copied(copies) for key, tensor in plan.stored.items()},
            tensors={name: copies[id(tensor)] for name, tensor in plan.tensors.items()} if rank == 0 else {},
        )

    def finish(self) -> None:
        """Make the deferred copies, or wait for the thread that is making them. Any thread may call this.

        It is also called before anybody gets a DTensor's local tensor, since writes to that are not counted by torch in
        the tensors that ``deferred`` has named.
        """
        with self._lock, torch.no_grad():
            for deferred in self._deferred:
                deferred.memory.copy_(deferred.original)
            samples = [deferred.sample_before for deferred in self._deferred]
            views = [self._sample_of_copy(deferred) for deferred in self._deferred]
            changed_indices = set(differing(samples, views))
            self._changed_names += [
                deferred.name
                for index, deferred in enumerate(self._deferred)
                if index in changed_indices or sum(map(times_written, deferred.counted_tensors)) != deferred.write_count
            ]
            self._deferred = []
        forget_call_before_parts(self.finish)

    def wait(self) -> None:
        """Wait until the last copies are complete. Any thread may call this.

        Raises:
            CheckpointError: A tensor was written to before its deferred copy was made; see :meth:`copy`.
        """
        self.finish()
        for event in self._copy_events:
            event.synchronize()
        if self._changed_names:
            raise CheckpointError(
                f"{self._changed_names[0]!r} was written to while it was being copied for a checkpoint, perhaps "
                "through .data, by code that is in no hook of Lightning's, such as training_step() or a data loader "
                f"({len(self._changed_names)} tensors in all).\n"
                "Write to parameters and optimizer state in hooks, such as on_train_batch_end(), or leave async_save "
                "out."
            )

    def free(self) -> None:
        """Release the memory."""
        self._deferred = []
        forget_call_before_parts(self.finish)
        self._blocks = []
        self._layout = []
        self._memory_of_layout = []
        self._copy_events = []
        self._views = {}

    def _sample_of_copy(self, deferred: _Deferred) -> Tensor:
        """Return a view of a copy's sampled elements. It is kept as long as the memory: making it is slow."""
        if id(deferred.memory) not in self._views:
            self._views[id(deferred.memory)] = view_of_sample(deferred.memory)
        return self._views[id(deferred.memory)]

    def _memory_for(self, originals: list[Tensor]) -> list[Tensor]:
        """Return memory for each tensor, of its shape and dtype: that of the last save if the layout is the same."""
        layout = [(tensor.shape, tensor.dtype) for tensor in originals]
        device_types = {tensor.device.type for tensor in originals}
        pinned = any(map(devices.can_pin_memory, device_types))
        if layout != self._layout or pinned != self._is_pinned:
            # Emptied first: the old views would keep the old blocks alive while new ones are allocated.
            self._layout = []
            self._memory_of_layout = []
            self._views = {}
            self._memory_of_layout = list(self._allocate(originals, pinned=pinned))
            self._layout = layout
        return self._memory_of_layout

    def _allocate(self, originals: list[Tensor], *, pinned: bool) -> Iterator[Tensor]:
        block_and_start: list[tuple[int, int]] = []
        sizes: list[int] = []
        for tensor in originals:
            nbytes = tensor.numel() * tensor.dtype.itemsize
            if not sizes or sizes[-1] + nbytes > _BLOCK_BYTES:
                sizes.append(0)
            block_and_start.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if pinned != self._is_pinned:
            self._blocks = []
            self._is_pinned = pinned
        del self._blocks[len(sizes) :]
        for i, size in enumerate(sizes):
            if i == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[i].numel() < size:
                self._blocks[i] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[i] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        typed_blocks: dict[tuple[int, torch.dtype], Tensor] = {}
        for tensor, (block, start) in zip(originals, block_and_start, strict=True):
            if (block, tensor.dtype) not in typed_blocks:
                typed_blocks[block, tensor.dtype] = self._blocks[block].view(tensor.dtype)
            memory = typed_blocks[block, tensor.dtype]
            yield memory.as_strided(tensor.shape, row_major_strides(tensor.shape), start // tensor.dtype.itemsize)


def _named_chunks(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank writes in boxes, with their keys."""
    for key, tensor in plan.stored.items():
        if tensor.replica == 0:
            yield from ((key, chunk.data) for chunk in tensor.chunks if isinstance(chunk.data, Tensor))


def _identity(tensor: Tensor) -> Any:
    """Return a value that is equal for tensors that view the same memory in the same way."""
    if not devices.has_addresses(tensor):
        return id(tensor)
    return (
        tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    )  # fmt: skip
