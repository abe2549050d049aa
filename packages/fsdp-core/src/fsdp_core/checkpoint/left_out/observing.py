"""Notices that this rank's part of a tensor was written to, cheaply enough to look at every tensor in every save.

On accelerators every element is read each time: their memory is fast. In host memory three things are compared: where
the part lies, how often torch has counted a write, and some elements. Where one of the first two differs, every byte is
read. What torch doesn't count and the elements don't show is found by a walk over all bytes, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.digests import box_sum
from fsdp_core.state.host_memory import memory_of
from fsdp_core.torch_private.tensors import times_written

__all__ = ["Hashes", "Observation", "Observed", "hash_all", "observe"]

Hashes = tuple[tuple[int, ...], ...]
"""The hashes of the bytes of each box, a piece each."""

#: So many bytes are hashed at once: the walk over all bytes can stop after each piece.
PIECE_BYTES = 2**20
#: At most so many elements of a rank's part of a tensor are compared in each save.
_MOST_SAMPLED = 512
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is observed of a tensor.

    Attributes:
        part: This rank's part.
        counters: Tensors whose version counter a write to the part may raise.
        is_live: Whether the part lies in the module's own memory. It is not where a backend copies it to the host, as
            from XLA's devices: each look then reads all of it.
    """

    part: ChunkedTensor
    counters: Sequence[Tensor] = ()
    is_live: bool = True

    @property
    def is_on_host(self) -> bool:
        """Whether the part lies in host memory."""
        return all(not isinstance(chunk.data, Tensor) or chunk.data.device.type == "cpu" for chunk in self.part.chunks)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a rank's part of a tensor was when it was observed.

    Attributes:
        addresses: Where its boxes lie in memory, with their shapes and dtypes.
        write_count: How often torch has counted a write.
        views: Views of the sampled elements, which see later writes.
        samples: Copies of these elements.
        pieces: For each box the hashes of its bytes, a piece each.
    """

    addresses: tuple[object, ...]
    write_count: int
    views: tuple[Tensor, ...]
    samples: tuple[Tensor, ...]
    pieces: Hashes

    def is_same(self, other: Observed, hashes: Hashes | None = None) -> Observation | None:
        """Return what to compare with the next time if the part has not changed, and ``None`` if it has.

        Args:
            other: The part now.
            hashes: The hashes of all its bytes, if they were computed already: that of a part on an accelerator.
        """
        addresses, write_count = _addresses(other.part), _count_writes(other.counters)
        if hashes is None and self.views and addresses == self.addresses:
            if not all(map(torch.equal, self.views, self.samples)):
                return None
            if write_count == self.write_count:
                return self
        if (hashes or hash_all([other])[0]) != self.pieces:
            return None
        if addresses == self.addresses or not other.is_live:
            return replace(self, write_count=write_count)
        return observe(other, self.pieces)

    def count_pieces(self) -> int:
        """The number of pieces that the walk has to look at: none on accelerators, where each save looks at all."""
        return sum(map(len, self.pieces)) if self.views else 0

    def is_piece_same(self, other: Observed, number: int) -> bool:
        """Whether the bytes of one piece are still those that were observed."""
        if _addresses(other.part) != self.addresses:
            return self.is_same(other) is not None
        for box, hashes in zip(_boxes(other.part), self.pieces, strict=True):
            if number < len(hashes):
                return _hash_piece(box, number) == hashes[number]
            number -= len(hashes)
        return True


def observe(observed: Observed, hashes: Hashes) -> Observation:
    """Observe a rank's part of a tensor.

    Args:
        observed: The part.
        hashes: The hashes of its bytes.
    """
    boxes = [chunk.data for chunk in observed.part.chunks if isinstance(chunk.data, Tensor)]
    can_sample = observed.is_live and observed.is_on_host and all(box.is_contiguous() for box in boxes)
    views = tuple(map(_sampled_view, boxes)) if can_sample else ()
    return Observation(
        addresses=_addresses(observed.part),
        write_count=_count_writes(observed.counters),
        views=views,
        samples=tuple(view.clone() for view in views),
        pieces=hashes,
    )


def _boxes(part: ChunkedTensor) -> list[Tensor]:
    boxes = []
    for chunk in part.chunks:
        data = chunk.data
        if not isinstance(data, Tensor):  # it is read when it is needed, as on XLA's devices
            data = data.read((0,) * len(data.shape), tuple(data.shape))
        boxes.append(data)
    return boxes


def _addresses(part: ChunkedTensor) -> tuple[object, ...]:
    return tuple(
        (chunk.data.data_ptr(), chunk.data.stride(), chunk.data.dtype, chunk.data.shape, chunk.offsets)
        if isinstance(chunk.data, Tensor)
        else object()  # equal to no other: it is read anew
        for chunk in part.chunks
    )


def _count_writes(counters: Sequence[Tensor]) -> int:
    return sum(map(times_written, counters))


def _sampled_view(box: Tensor) -> Tensor:
    """A view of elements that are spread evenly, in a smaller box one of each row, each in another column."""
    bits = box.detach().view(_BITS[box.dtype.itemsize]) if not box.is_complex() else torch.view_as_real(box.detach())
    elements = bits.numel()
    row = elements // bits.shape[0] if bits.ndim > 1 else 1
    step = max(row - 1, -(-elements // _MOST_SAMPLED), 1)
    return bits.as_strided((-(-elements // step),), (step,))


def hash_all(observed: Sequence[Observed]) -> list[Hashes]:
    """Return the hashes of all bytes of each part: by piece in host memory, and a sum of each box on an accelerator."""
    hashes: list[Hashes] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in observed:
        boxes = _boxes(tensor.part)
        if tensor.is_on_host:
            hashes.append(tuple(tuple(_hash_piece(box, n) for n in range(_piece_count(box))) for box in boxes))
            continue
        for box in boxes:
            sums.setdefault(box.device, []).append(box_sum(box, (0,) * box.ndim))
        hashes.append(())
    # one wait for each device, for the boxes of all tensors
    totals = {device: iter(torch.stack(of_device).tolist()) for device, of_device in sums.items()}
    for index, tensor in enumerate(observed):
        if not tensor.is_on_host:
            hashes[index] = tuple((int(next(totals[box.device])),) for box in _boxes(tensor.part))
    return hashes


def _piece_count(box: Tensor) -> int:
    return -(-box.nbytes // PIECE_BYTES)


def _hash_piece(box: Tensor, number: int) -> int:
    memory = memory_of(box.contiguous())
    return xxhash.xxh3_64_intdigest(memory[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
