"""Boxes of a tensor as row-major bytes: cutting a tensor or a run into boxes, copying one into another. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import add
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


def cut(shape: Sequence[int], item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Cut a tensor into consecutive boxes in row-major order.

    Args:
        shape: The tensor's shape.
        item_bytes: The size of one element in bytes.
        max_bytes: The maximum size of a box with more than one element.

    Yields:
        Offsets and lengths of each box; none if the tensor is empty.

    Example:
        >>> list(cut((3, 2), 4, 16))
        [((0, 0), (2, 2)), ((2, 0), (1, 2))]
    """
    if 0 not in shape:
        yield from _cut((0,) * len(shape), tuple(shape), item_bytes, max_bytes)


def _cut(offsets: tuple[int, ...], lengths: tuple[int, ...], item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Cut a box along its first axis that is longer than 1, and what is still too large along the next ones."""
    axis = next((i for i, length in enumerate(lengths) if length > 1), None)
    total_bytes = item_bytes * math.prod(lengths)
    if axis is None or total_bytes <= max_bytes:
        yield offsets, lengths
        return
    row_bytes = total_bytes // lengths[axis]
    rows = max(1, max_bytes // row_bytes)
    for row in range(0, lengths[axis], rows):
        begin = (*offsets[:axis], offsets[axis] + row, *offsets[axis + 1 :])
        size = (*lengths[:axis], min(rows, lengths[axis] - row), *lengths[axis + 1 :])
        yield from _cut(begin, size, item_bytes, max_bytes)


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
    if not shape:
        yield (), (), 0
        return
    if len(shape) == 1:
        yield (start,), (length,), 0
        return
    row_length = math.prod(shape[1:])
    row, start_in_row = divmod(start, row_length)
    done = 0  # how many elements the boxes so far hold
    if start_in_row or length < row_length:
        done = min(length, row_length - start_in_row)
        for offsets, lengths, position in boxes(shape[1:], start_in_row, done):
            yield (row, *offsets), (1, *lengths), position
        row += 1
    full_rows, remaining = divmod(length - done, row_length)
    if full_rows:
        yield (row, *(0 for _ in shape[1:])), (full_rows, *shape[1:]), done
        row += full_rows
        done += full_rows * row_length
    if remaining:
        for offsets, lengths, position in boxes(shape[1:], 0, remaining):
            yield (row, *offsets), (1, *lengths), done + position


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or ``None`` if they don't overlap.

    Example:
        >>> overlap(((0, 0), (2, 2)), ((1, 0), (4, 1)))
        ((1, 0), (1, 1))
        >>> overlap(((0,), (2,)), ((2,), (2,))) is None
        True
    """
    (offsets_a, lengths_a), (offsets_b, lengths_b) = a, b
    begins = tuple(map(max, offsets_a, offsets_b))
    ends_a = map(add, offsets_a, lengths_a)
    ends_b = map(add, offsets_b, lengths_b)
    lengths = tuple(min(end_a, end_b) - begin for begin, end_a, end_b in zip(begins, ends_a, ends_b, strict=True))
    return (begins, lengths) if all(length > 0 for length in lengths) else None


def copy_into(target: memoryview, shape: Sequence[int], offsets: Sequence[int], box: memoryview, item_bytes: int,
              lengths: Sequence[int]) -> None:  # fmt: skip
    """Copy the bytes of a box into a larger one.

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
    if axis == 0:
        target[:] = box
        return
    inner_bytes = math.prod(shape[axis:]) * item_bytes
    run = lengths[axis - 1] * inner_bytes
    pitch = shape[axis - 1] * inner_bytes  # from the begin of a run to that of the next
    first = offsets[axis - 1] * inner_bytes
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
    run_layout: tuple[int, int, int],
) -> None:
    """Copy the runs of a box: along axes before the one that a run lies in.

    Args:
        target: The bytes of the larger box.
        shape: The shape of the larger box, along these axes only; so are ``offsets`` and ``lengths``.
        offsets: Where the smaller box begins.
        lengths: The shape of the smaller box.
        box: The bytes of the smaller box.
        run_layout: In bytes, where the first run begins, the length of a run, and the distance of two in ``target``.
    """
    first, run, pitch = run_layout
    if len(shape) > 1:
        target_size = math.prod(shape[1:]) * pitch
        box_size = math.prod(lengths[1:]) * run
        for row in range(lengths[0]):
            begin = (offsets[0] + row) * target_size
            target_row = target[begin : begin + target_size]
            box_row = box[row * box_size : (row + 1) * box_size]
            _copy_runs(target_row, shape[1:], offsets[1:], lengths[1:], box_row, run_layout)
        return
    begin = offsets[0] * pitch + first
    rows = lengths[0]
    # Runs begin and end at multiples of this many bytes; 8 are the most that a memoryview can copy as one item.
    unit = math.gcd(run, pitch, begin, 8)
    columns = run // unit
    if rows <= columns:  # fewer copies than one for each column
        for row in range(rows):
            run_begin = begin + row * pitch
            target[run_begin : run_begin + run] = box[row * run : (row + 1) * run]
        return
    # Many short runs: copied column by column, each column with one strided copy.
    unit_format: Any = {8: "Q", 4: "I", 2: "H", 1: "B"}[unit]
    target_units = target.cast(unit_format)
    box_units = box.cast(unit_format)
    step = pitch // unit
    for column in range(columns):
        start = begin // unit + column
        target_units[start : start + (rows - 1) * step + 1 : step] = box_units[column::columns]


@lru_cache(maxsize=1024)
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    Example:
        >>> row_major_strides((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
