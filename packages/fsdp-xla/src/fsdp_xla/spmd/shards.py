"""The devices' shards of a tensor as boxes on the host, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_core.state import Chunk, ChunkedTensor
from fsdp_xla.torch_xla_private.sharded_tensors import (
    from_shards,
    is_marked,
    local_boxes,
    local_shards,
    sharding_of,
)

__all__ = ["DeviceLayout", "HostShards", "copy_shards", "layout_on_devices"]


def copy_shards(tensor: Tensor) -> ChunkedTensor:
    """Copy a tensor to the host, shard by shard. It must not depend on pending computations."""
    tensor, shape = tensor.detach(), tuple(tensor.shape)
    boxes = local_boxes(tensor) if is_marked(tensor) else []
    if all(lengths == shape for _, _, lengths in boxes):
        chunks_of_replica = () if 0 in shape else (Chunk(offsets=(0,) * len(shape), data=tensor.cpu()),)
        return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=chunks_of_replica)
    chunks = tuple(
        Chunk(offsets=offsets, data=_without_padding(shard, lengths))
        for shard, (replica, offsets, lengths) in zip(local_shards(tensor), boxes, strict=True)
        if replica == 0 and min(lengths) > 0
    )
    return ChunkedTensor(shape=shape, dtype=tensor.dtype, chunks=chunks)


class DeviceLayout(NamedTuple):
    """The layout of a tensor on the devices.

    Attributes:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        boxes: The result of :func:`~fsdp_xla.torch_xla_private.sharded_tensors.local_boxes`.
        sharding: XLA's sharding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    sharding: Any


def layout_on_devices(tensor: Tensor) -> DeviceLayout:
    """The layout of a marked tensor. It must not depend on pending computations."""
    tensor = tensor.detach()
    return DeviceLayout(tuple(tensor.shape), tensor.dtype, local_boxes(tensor), sharding_of(tensor))


class HostShards:
    """Host memory for the devices' shards of a tensor, to be filled and then transferred.

    Args:
        like: The layout on the devices, or a marked tensor with that layout.
        dtype: The dtype; that of ``like`` when ``None``.
    """

    def __init__(self, like: Tensor | DeviceLayout, dtype: torch.dtype | None = None) -> None:
        layout = layout_on_devices(like) if isinstance(like, Tensor) else like
        self._sharding = layout.sharding
        self._buffers: list[Tensor] = []
        shape, dtype, boxes = layout.shape, dtype or layout.dtype, layout.boxes
        # All shards are padded to the shape of the first one, which has no padding.
        padded_shape = tuple(max(0, length) for length in boxes[0][2])
        buffer_by_offsets: dict[tuple[int, ...], Tensor] = {}
        chunks: list[Chunk] = []
        for _, offsets, lengths in boxes:
            # Replicas of a box share a buffer. A shard that is all padding has a buffer of zeros.
            is_empty = bool(lengths) and min(lengths) <= 0
            if is_empty or offsets not in buffer_by_offsets:
                buffer = torch.zeros(padded_shape, dtype=dtype)
                if not is_empty:
                    buffer_by_offsets[offsets] = buffer
                    chunks.append(Chunk(offsets=offsets, data=_without_padding(buffer, lengths)))
                self._buffers.append(buffer)
            else:
                self._buffers.append(buffer_by_offsets[offsets])
        #: Where to write the tensor's values.
        self.chunks = ChunkedTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))

    def tensor(self) -> Tensor:
        """Create the tensor on the devices, with the layout of ``like``."""
        return from_shards(self._buffers, self._sharding, self.chunks.shape)


def _without_padding(shard: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return shard[tuple(slice(0, length) for length in lengths)]
