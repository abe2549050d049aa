"""Tensors in chunks, as if several ranks held them; and the boxes that these are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from fsdp_core.checkpoint import Chunk, ChunkedTensor
from fsdp_core.state.coverage import Box


def slices_of(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def in_boxes(tensor: Tensor, boxes: Iterable[Box], replica: int = 0) -> ChunkedTensor:
    """Some boxes of a tensor, each a view into it."""
    chunks = tuple(Chunk(offsets=offsets, data=tensor[slices_of(offsets, lengths)]) for offsets, lengths in boxes)
    return ChunkedTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, chunks=chunks, replica=replica)


def in_pieces(tensor: Tensor, axis: int, *cuts: int) -> ChunkedTensor:
    """All of a tensor, cut along an axis."""
    shape, boxes = tuple(tensor.shape), []
    for first, last in pairwise([0, *cuts, shape[axis]]):
        offsets = tuple(first if dim == axis else 0 for dim in range(len(shape)))
        boxes.append((offsets, (*shape[:axis], last - first, *shape[axis + 1 :])))
    return in_boxes(tensor, boxes)


def rank_rows(rows: Tensor, rank: int, ranks: int) -> ChunkedTensor:
    """A rank's rows of a tensor of which all ranks have as many."""
    count, *others = rows.shape
    chunk = Chunk(offsets=(rank * count, *[0] * len(others)), data=rows)
    return ChunkedTensor(shape=(ranks * count, *others), dtype=rows.dtype, chunks=(chunk,))


def split(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Box]:
    """Cut a box in two, ``cuts`` times, anywhere."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        offsets, lengths = boxes.pop(rng.randrange(len(boxes)))
        axes = [axis for axis, length in enumerate(lengths) if length > 1]
        if not axes:
            boxes.append((offsets, lengths))
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, lengths[axis])
        low, high, rest = list(lengths), list(lengths), list(offsets)
        low[axis], high[axis], rest[axis] = at, lengths[axis] - at, offsets[axis] + at
        boxes += [(offsets, tuple(low)), (tuple(rest), tuple(high))]
    rng.shuffle(boxes)
    return boxes
