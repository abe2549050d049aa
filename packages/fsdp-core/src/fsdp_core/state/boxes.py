"""Boxes of a tensor as row-major bytes: cutting a tensor or a run into boxes, copying one into another. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from fsdp_core.state.coverage import Box

__all__ = ["MAX_DIMENSIONS", "boxes", "copy_into", "cut", "is_shape", "overlap", "row_major_strides"]

MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**53 - 1  # the largest integer that every JSON reader represents exactly


def is_shape(shape: Sequence[int]) -> bool:
    """Return whether a tensor can have a shape, with the strides that torch computes even for an empty one.

    Example:
        >>> is_shape((0, 2**20)), is_shape((0, 2**40, 2**40)), is_shape((-1,)), is_shape((1,) * 65)
        (True, False, False, False)
    """
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= _MAX_ELEMENTS for size in shape):
        return False
    return math.prod(max(size, 1) for size in shape) <= _MAX_ELEMENTS


def cut(shape: Sequence[int], item_bytes: int, most_bytes: int) -> Iterator[Box]:
    """Cut a tensor into consecutive boxes in row-major order.

    Args:
        shape: The tensor's shape.
        item_bytes: The size of one element in bytes.
        most_bytes: The maximum size of a box with more than one element.

    Yields:
        Offsets and lengths of each box; none if the tensor is empty.

    Example:
        >>> list(cut((3, 2), 4, 16))
        [((0, 0), (2, 2)), ((2, 0), (1, 2))]
    """
    if 0 not in shape:
        yield from _cut((0,) * len(shape), tuple(shape), item_bytes, most_bytes)


def _cut(offsets: tuple[int, ...], lengths: tuple[int, ...], item_bytes: int, most_bytes: int) -> Iterator[Box]:
    axis = next((i for i, length in enumerate(lengths) if length > 1), None)
    total = item_bytes * math.prod(lengths)
    if axis is None or total <= most_bytes:
        yield offsets, lengths
        return
    rows = max(1, most_bytes // (total // lengths[axis]))
    for row in range(0, lengths[axis], rows):
        begin = (*offsets[:axis], offsets[axis] + row, *offsets[axis + 1 :])
        size = (*lengths[:axis], min(rows, lengths[axis] - row), *lengths[axis + 1 :])
        yield from _cut(begin, size, item_bytes, most_bytes)


def boxes(shape: tuple[int, ...], start: int, length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut a run of consecutive elements into boxes: the rest of a row, whole rows, the beginning of a row, and so on.

    Args:
        shape: The shape of the full tensor.
        start: The index of the run's first element, in C order.
        length: The number of elements.

    Yields:
        The offsets and lengths of a box, and where it begins in the run; at most ``2 * len(shape) - 1`` boxes.

    Example:
        >>> list(boxes((3, 4), 2, 8))
        [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 2), 6)]
        >>> list(boxes((), 0, 1))
        [((), (), 0)]
    """
    if not length:
        return
    if len(shape) <= 1:
        yield ((start,), (length,), 0) if shape else ((), (), 0)
        return
    row = math.prod(shape[1:])
    first, within = divmod(start, row)
    done = 0
    if within or length < row:
        done = min(length, row - within)
        for offsets, lengths, position in boxes(shape[1:], within, done):
            yield (first, *offsets), (1, *lengths), position
        first += 1
    rows, rest = divmod(length - done, row)
    if rows:
        yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:]), done
        first = first + rows
        done = done + rows * row
    if rest:
        for offsets, lengths, position in boxes(shape[1:], 0, rest):
            yield (first, *offsets), (1, *lengths), done + position


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or ``None`` if they don't overlap.

    Example:
        >>> overlap(((0, 0), (2, 2)), ((1, 0), (4, 1)))
        ((1, 0), (1, 1))
        >>> overlap(((0,), (2,)), ((2,), (2,))) is None
        True
    """
    low = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    high = tuple(min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    lengths = tuple(y - x for x, y in zip(low, high, strict=True))
    return (low, lengths) if all(length > 0 for length in lengths) else None


def copy_into(target: memoryview, shape: Sequence[int], offsets: Sequence[int], box: memoryview, item_bytes: int,
              lengths: Sequence[int]) -> None:  # fmt: skip
    """Copy the bytes of a box to its place in a larger one.

    Args:
        target: The bytes of the larger box.
        shape: The shape of the larger box.
        offsets: Where the smaller box begins in the larger one.
        box: The bytes of the smaller box.
        item_bytes: The size of one element in bytes.
        lengths: The shape of the smaller box.
    """
    # Trailing axes that are complete form one run of bytes.
    axis = len(shape)
    while axis > 0 and shape[axis - 1] == lengths[axis - 1]:
        axis -= 1
    inner = math.prod(shape[axis:]) * item_bytes
    if axis == 0:
        target[:] = box
        return
    run = lengths[axis - 1] * inner
    pitch = shape[axis - 1] * inner
    first = offsets[axis - 1] * inner
    if axis == 1:
        target[first : first + run] = box
        return
    _copy_runs(target, shape[: axis - 1], offsets[: axis - 1], lengths[: axis - 1], box, (first, run, pitch))


def _copy_runs(
    target: memoryview,
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    box: memoryview,
    piece: tuple[int, int, int],
) -> None:
    first, run, pitch = piece
    if len(shape) > 1:
        size = math.prod(shape[1:]) * pitch
        part = math.prod(lengths[1:]) * run
        for row in range(lengths[0]):
            begin = (offsets[0] + row) * size
            inner = target[begin : begin + size], shape[1:], offsets[1:], lengths[1:]
            _copy_runs(*inner, box[row * part : (row + 1) * part], piece)
        return
    begin = offsets[0] * pitch + first
    rows = lengths[0]
    unit = math.gcd(run, pitch, begin, 8)
    if rows <= run // unit:
        for row in range(rows):
            at = begin + row * pitch
            target[at : at + run] = box[row * run : (row + 1) * run]
        return
    # Many short runs: copied column by column, each column with one strided copy.
    code: Any = {8: "Q", 4: "I", 2: "H", 1: "B"}[unit]
    wide = target.cast(code)
    narrow = box.cast(code)
    step = pitch // unit
    count = run // unit
    for column in range(count):
        start = begin // unit + column
        wide[start : start + (rows - 1) * step + 1 : step] = narrow[column::count]


@lru_cache(maxsize=1024)
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    Example:
        >>> row_major_strides((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
