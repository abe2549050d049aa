"""Recognises patterns in the boxes of all ranks: a grid of boxes, or runs of elements in row-major order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise, product

from fsdp_core.checkpoint.format.patterns import MAX_PIECES, Pattern, Ranks, Sizes
from fsdp_core.state.boxes import boxes
from fsdp_core.state.coverage import Box

__all__ = ["pattern_of"]


def pattern_of(shape: tuple[int, ...], boxes_by_rank: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    """Return the pattern of a tensor's boxes, or ``None`` if they form none or don't cover the tensor.

    Args:
        shape: The tensor's shape.
        boxes_by_rank: The boxes of each rank that holds any.

    Example:
        >>> halves = [(0, (((0, 0), (2, 3)),)), (1, (((2, 0), (2, 3)),))]
        >>> pattern_of((4, 3), halves).to_json()
        {'grid': [((2, 2),), ((3, 1),)], 'ranks': ((0, 1, 2),)}
        >>> runs = [(0, (((0, 0), (1, 2)),)), (1, (((0, 2), (1, 1)), ((1, 0), (1, 3))))]
        >>> pattern_of((2, 3), runs).to_json()
        {'runs': ((2, 1), (4, 1)), 'ranks': ((0, 1, 2),)}
        >>> pattern_of((2, 3), runs[1:]) is None
        True
    """
    box_count = sum(len(rank_boxes) for _, rank_boxes in boxes_by_rank)
    if 0 in shape or not 0 < box_count <= MAX_PIECES:
        return None
    return _find_grid(shape, boxes_by_rank) or _find_runs(shape, boxes_by_rank)


def _find_grid(shape: tuple[int, ...], boxes_by_rank: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    boxes_with_ranks = sorted((*box, rank) for rank, rank_boxes in boxes_by_rank for box in rank_boxes)
    starts_by_axis = [sorted({offsets[axis] for offsets, _, _ in boxes_with_ranks}) for axis in range(len(shape))]
    if math.prod(map(len, starts_by_axis)) != len(boxes_with_ranks):
        return None
    if any(starts[0] != 0 or starts[-1] >= size for starts, size in zip(starts_by_axis, shape, strict=True)):
        return None
    lengths_by_axis = [
        [end - start for start, end in pairwise([*starts, size])]
        for starts, size in zip(starts_by_axis, shape, strict=True)
    ]
    # If the boxes form a grid, they are, in order, the products of the starts and of the lengths along the axes.
    grid_boxes = zip(product(*starts_by_axis), product(*lengths_by_axis), strict=True)
    for (cell_offsets, cell_lengths), (offsets, sizes, _) in zip(grid_boxes, boxes_with_ranks, strict=True):
        if cell_offsets != offsets or cell_lengths != sizes:
            return None
    ranks = Ranks.of([rank for *_, rank in boxes_with_ranks])
    return Pattern(shape=shape, ranks=ranks, grid=tuple(map(_join_equal_lengths, lengths_by_axis)))


def _find_runs(shape: tuple[int, ...], boxes_by_rank: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    runs = []
    for rank, rank_boxes in boxes_by_rank:
        first_offsets, _ = rank_boxes[0]
        start = 0  # the flat index of the first element
        for offset, size in zip(first_offsets, shape, strict=True):
            start = start * size + offset
        length = sum(math.prod(lengths) for _, lengths in rank_boxes)
        if start + length > math.prod(shape):
            return None
        boxes_of_run = tuple((offsets, lengths) for offsets, lengths, _ in boxes(shape, start, length))
        if rank_boxes != boxes_of_run:
            return None
        runs.append((start, length, rank))
    runs.sort()
    end = 0
    for start, length, _ in runs:
        if start != end:
            return None
        end += length
    if end != math.prod(shape):
        return None
    return Pattern(
        shape=shape,
        ranks=Ranks.of([rank for *_, rank in runs]),
        runs=_join_equal_lengths([length for _, length, _ in runs]),
    )


def _join_equal_lengths(lengths: Sequence[int]) -> Sizes:
    return Sizes(tuple((length, len(list(equal))) for length, equal in groupby(lengths)))
