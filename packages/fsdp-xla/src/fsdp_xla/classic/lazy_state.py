"""State that stays on the device until it is written, for ranks that save one after another.

With ``sequential_save``, a state holds sources instead of copies, which are read only when they are written, and core's
``save`` lets the ranks of a host write in turn. So no rank's full state is ever in host memory.
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

__all__ = ["DeviceFlat", "gather_in_turn", "read_late"]


class DeviceFlat:
    """A rank's shard of parameters on its device. It is copied to host memory from the first read to that of its end.

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
        # On the meta device: only the shapes of the boxes and their storage offsets are needed.
        boxes = cast(ChunkedTensor, part.of(torch.empty(self._tensor.numel(), dtype=self._tensor.dtype, device="meta")))
        chunks = tuple(
            Chunk(offsets=chunk.offsets, data=_Box(self, cast(Tensor, chunk.data))) for chunk in boxes.chunks
        )
        return ChunkedTensor(shape=boxes.shape, dtype=boxes.dtype, chunks=chunks, replica=boxes.replica)

    def read(self, start: int, length: int) -> Tensor:
        """Return consecutive elements in host memory."""
        if self._host is None:
            self._host = flat_on_host(self._tensor)
        elements = self._host[start : start + length]
        if start + length >= self._end:
            self._host = None
        return elements


class _Box:
    """A box of a parameter that is contiguous in a :class:`DeviceFlat`, as a source for writing checkpoints."""

    def __init__(self, flat: DeviceFlat, box: Tensor) -> None:
        self._flat, self._start = flat, int(box.storage_offset())
        self.shape, self.dtype = tuple(box.shape), box.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read full rows, or a part of one row, which are consecutive elements of the shard."""
        position = 0
        for offset, size in zip(offsets, self.shape, strict=True):
            position = position * size + offset
        return self._flat.read(self._start + position, prod(lengths)).view(tuple(lengths))


def read_late(named_state: dict[str, Any], optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, Any]:
    """Replace the values of an optimizer's state by sources, which are read when they are written.

    Args:
        named_state: The result of :func:`fsdp_core.state.optimizer_state`, without values.
        optimizer: The optimizer on the device.
        layout: The parts of the user's parameters in its parameters.
    """
    late_state: dict[str, dict[str, ChunkedTensor]] = {}
    for parameter, values in cast("dict[nn.Parameter, dict[str, Any]]", optimizer.state).items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                flat = DeviceFlat(value, layout[parameter])
                for part in layout[parameter]:
                    if not part.is_empty:
                        late_state.setdefault(part.name, {})[key] = flat.part(part)
    state = {name: {**values, **late_state.get(name, {})} for name, values in named_state["state"].items()}
    return {**named_state, "state": state}


def gather_in_turn(value: ChunkedTensor, runtime: Runtime) -> Tensor | None:
    """Gather a full tensor on rank 0, to which ranks send their parts one after another. All ranks must call it.

    Raises:
        CheckpointError: A rank could not read its part; raised on all ranks.
    """
    full_tensor = torch.empty(value.shape, dtype=value.dtype) if runtime.rank == 0 else None

    def own_boxes() -> list[tuple[tuple[int, ...], Tensor]]:
        return [(chunk.offsets, _read_chunk(chunk.data)) for chunk in value.chunks] if value.replica == 0 else []

    for rank in range(runtime.world_size):
        step: Callable[[], Any] = own_boxes if rank == runtime.rank else lambda: None
        boxes_by_rank = gather_to_first(runtime, "gathering a full checkpoint", step)
        if boxes_by_rank is not None and full_tensor is not None:
            for offsets, data in boxes_by_rank[rank]:
                full_tensor[tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))] = data
    return full_tensor


def _read_chunk(data: Any) -> Tensor:
    return data if isinstance(data, Tensor) else data.read((0,) * len(data.shape), data.shape)
