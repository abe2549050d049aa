"""State that stays on the device until it is written, for ranks that save one after another.

With ``sequential_save`` a state holds sources instead of copies, which are read when they are written, and the ranks
of a host save in turn. So the state of a rank is never in host memory as a whole, under Trainer and Fabric alike, and
core's ``save`` only needs to take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_core import Runtime
from fsdp_core.checkpoint import gather_to_first
from fsdp_core.state import Chunk, ChunkedTensor, Layout, Part
from fsdp_xla.classic.host_state import flat_on_host

__all__ = ["DeviceFlat", "gathered_in_turn", "read_late"]


class DeviceFlat:
    """A rank's shard of parameters, on its device. It is in host memory from its first read to the read of its end.

    Args:
        tensor: A shard, or optimizer state with the layout of one.
        parts: The parts of the user's parameters in it.
    """

    def __init__(self, tensor: Tensor, parts: Sequence[Part]) -> None:
        self._tensor: Tensor = tensor
        self._end = max(part.range.offset + part.range.length for part in parts if part.range is not None)
        self._host: Tensor | None = None

    def part(self, part: Part) -> ChunkedTensor:
        """The elements of one parameter, as boxes that are read when they are written."""
        # shapes and offsets without memory: slices know their storage offset
        boxes = cast(ChunkedTensor, part.of(torch.empty(self._tensor.numel(), dtype=self._tensor.dtype, device="meta")))
        chunks = tuple(
            Chunk(offsets=chunk.offsets, data=_Box(self, cast(Tensor, chunk.data))) for chunk in boxes.chunks
        )
        return ChunkedTensor(shape=boxes.shape, dtype=boxes.dtype, chunks=chunks, replica=boxes.replica)

    def read(self, start: int, length: int) -> Tensor:
        """Return consecutive elements in host memory."""
        if self._host is None:
            self._host = flat_on_host(self._tensor)
        run = self._host[start : start + length]
        if start + length >= self._end:
            self._host = None
        return run


class _Box:
    """A box of a parameter that is contiguous in a :class:`DeviceFlat`, as a source for writing checkpoints."""

    def __init__(self, flat: DeviceFlat, box: Tensor) -> None:
        self._flat, self._start = flat, int(box.storage_offset())
        self.shape, self.dtype = tuple(box.shape), box.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read whole rows, or a part of one: elements that are contiguous here too."""
        at = 0
        for offset, size in zip(offsets, self.shape, strict=True):
            at = at * size + offset
        return self._flat.read(self._start + at, prod(lengths)).view(tuple(lengths))


def read_late(described: dict[str, Any], optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, Any]:
    """An optimizer's state dict with tensors that are read when they are written.

    Args:
        described: The result of :func:`fsdp_core.state.optimizer_state`.
        optimizer: The optimizer on the device.
        layout: The parts of the user's parameters in its parameters.
    """
    late: dict[str, dict[str, ChunkedTensor]] = {}
    for parameter, values in cast("dict[nn.Parameter, dict[str, Any]]", optimizer.state).items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                flat = DeviceFlat(value, layout[parameter])
                for part in layout[parameter]:
                    if not part.is_empty:
                        late.setdefault(part.name, {})[key] = flat.part(part)
    state = {name: {**values, **late.get(name, {})} for name, values in described["state"].items()}
    return {**described, "state": state}


def gathered_in_turn(value: ChunkedTensor, runtime: Runtime) -> Tensor | None:
    """Gather a full tensor on rank 0, to which ranks send their parts one after another. All ranks must call it.

    Raises:
        CheckpointError: A rank could not read its part; raised on all ranks.
    """
    full_tensor = torch.empty(value.shape, dtype=value.dtype) if runtime.rank == 0 else None

    def own_boxes() -> list[tuple[tuple[int, ...], Tensor]]:
        return [(chunk.offsets, _in_memory(chunk.data)) for chunk in value.chunks] if value.replica == 0 else []

    for rank in range(runtime.world_size):
        step: Callable[[], Any] = own_boxes if rank == runtime.rank else lambda: None
        sent = gather_to_first(runtime, "gathering a full checkpoint", step)
        if sent is not None and full_tensor is not None:
            for offsets, data in sent[rank]:
                full_tensor[tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))] = data
    return full_tensor


def _in_memory(data: Any) -> Tensor:
    return data if isinstance(data, Tensor) else data.read((0,) * len(data.shape), data.shape)
