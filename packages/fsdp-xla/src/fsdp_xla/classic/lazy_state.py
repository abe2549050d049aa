"""State that stays on the device until it is written, for ranks that save one after another.

With ``sequential_save`` a state holds sources instead of copies, which are read as they are written, and a save gives
each rank of a host a turn. So a shard is never in host memory as a whole, under Trainer and Fabric alike, and core's
``save`` needs to know no more than that there are turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_core import Runtime
from fsdp_core.checkpoint import together
from fsdp_core.state import Chunk, ChunkedTensor, Layout, Part
from fsdp_xla.classic.host_state import flat_on_host

__all__ = ["DeviceFlat", "gathered_in_turn", "read_late"]


class DeviceFlat:
    """What a rank holds of parameters, on its device. It is in host memory from its first read to that of its end.

    Args:
        tensor: A shard, or state of an optimizer that is laid out as one.
        parts: What it has of the user's parameters.
    """

    def __init__(self, tensor: Tensor, parts: Sequence[Part]) -> None:
        self._tensor: Tensor = tensor
        self._end = max(part.range.offset + part.range.length for part in parts if part.range is not None)
        self._host: Tensor | None = None

    def part(self, part: Part) -> ChunkedTensor:
        """What it has of one parameter, by boxes that are read when they are written."""
        # shapes and offsets without memory: what is cut knows where it began
        boxes = cast(ChunkedTensor, part.of(torch.empty(self._tensor.numel(), dtype=self._tensor.dtype, device="meta")))
        chunks = tuple(
            Chunk(offsets=chunk.offsets, data=_Box(self, cast(Tensor, chunk.data))) for chunk in boxes.chunks
        )
        return ChunkedTensor(shape=boxes.shape, dtype=boxes.dtype, chunks=chunks, replica=boxes.replica)

    def read(self, start: int, length: int) -> Tensor:
        """Consecutive elements, in host memory."""
        if self._host is None:
            self._host = flat_on_host(self._tensor)
        run = self._host[start : start + length]
        if start + length >= self._end:
            self._host = None
        return run


class _Box:
    """A box of a parameter that lies in a row in a :class:`DeviceFlat`; a source, as checkpoints are written from."""

    def __init__(self, flat: DeviceFlat, place: Tensor) -> None:
        self._flat, self._start = flat, int(place.storage_offset())
        self.shape, self.dtype = tuple(place.shape), place.dtype

    def read(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read whole rows, or a part of one: elements that lie in a row here too."""
        at = 0
        for offset, size in zip(offsets, self.shape, strict=True):
            at = at * size + offset
        return self._flat.read(self._start + at, prod(lengths)).view(tuple(lengths))


def read_late(described: dict[str, Any], optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, Any]:
    """What was described of an optimizer, with tensors that are read when they are written.

    Args:
        described: As from :func:`fsdp_core.state.optimizer_state`.
        optimizer: The optimizer on the device.
        layout: What its parameters have of the user's.
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
    """The whole of a tensor on rank 0, to which ranks hand their parts one after another. All ranks must call it.

    Raises:
        CheckpointError: A rank could not read its part; raised on all.
    """
    whole = torch.empty(value.shape, dtype=value.dtype) if runtime.rank == 0 else None

    def mine() -> list[tuple[tuple[int, ...], Tensor]]:
        return [(chunk.offsets, _in_memory(chunk.data)) for chunk in value.chunks] if value.replica == 0 else []

    for rank in range(runtime.world_size):
        step: Callable[[], Any] = mine if rank == runtime.rank else lambda: None
        for offsets, data in together(runtime, "gathering a full checkpoint", step)[rank]:
            if whole is not None:
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))] = data
    return whole


def _in_memory(data: Any) -> Tensor:
    return data if isinstance(data, Tensor) else data.read((0,) * len(data.shape), data.shape)
