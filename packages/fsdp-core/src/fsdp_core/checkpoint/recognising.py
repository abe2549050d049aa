"""Recognises grids and runs in the boxes of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise, product

from fsdp_core.checkpoint.format.patterns import MAX_PIECES, Pattern, Ranks, Sizes
from fsdp_core.state.boxes import boxes
from fsdp_core.state.coverage import Box

__all__ = ["pattern_of"]


def pattern_of(shape: tuple[int, ...], held: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    """Return the pattern of a tensor's boxes, or ``None`` if they form none or don't cover the tensor.

    Args:
        shape: The tensor's shape.
        held: The boxes of each rank that holds any.

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
    if 0 in shape or not 0 < sum(len(of_rank) for _, of_rank in held) <= MAX_PIECES:
        return None
    return _grid(shape, held) or _runs(shape, held)


def _grid(shape: tuple[int, ...], held: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    placed = sorted((*box, rank) for rank, of_rank in held for box in of_rank)
    begins = [sorted({offsets[axis] for offsets, _, _ in placed}) for axis in range(len(shape))]
    if math.prod(map(len, begins)) != len(placed):
        return None
    if any(at[0] != 0 or at[-1] >= size for at, size in zip(begins, shape, strict=True)):
        return None
    lengths = [[b - a for a, b in pairwise([*at, size])] for at, size in zip(begins, shape, strict=True)]
    cells = product(*(zip(at, of_axis, strict=True) for at, of_axis in zip(begins, lengths, strict=True)))
    for cell, (offsets, sizes, _) in zip(cells, placed, strict=True):
        if tuple(begin for begin, _ in cell) != offsets or tuple(length for _, length in cell) != sizes:
            return None
    ranks = Ranks.of([rank for *_, rank in placed])
    return Pattern(shape=shape, ranks=ranks, grid=tuple(map(_in_runs, lengths)))


def _runs(shape: tuple[int, ...], held: Sequence[tuple[int, tuple[Box, ...]]]) -> Pattern | None:
    found = []
    for rank, of_rank in held:
        start = 0
        for offset, size in zip(of_rank[0][0], shape, strict=True):
            start = start * size + offset
        length = sum(math.prod(lengths) for _, lengths in of_rank)
        if start + length > math.prod(shape) or of_rank != tuple(box[:2] for box in boxes(shape, start, length)):
            return None
        found.append((start, length, rank))
    found.sort()
    end = 0
    for start, length, _ in found:
        if start != end:
            return None
        end += length
    if end != math.prod(shape):
        return None
    return Pattern(
        shape=shape, ranks=Ranks.of([rank for *_, rank in found]), runs=_in_runs([length for _, length, _ in found])
    )


def _in_runs(lengths: Sequence[int]) -> Sizes:
    return Sizes(tuple((length, len(list(equal))) for length, equal in groupby(lengths)))
