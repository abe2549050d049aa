"""Checks that boxes cover a tensor exactly, and locates the first hole or overlap."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

__all__ = ["Box", "find_fault"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the lengths of a box, one number of each per dimension."""

_PRIME = 2**127 - 1
_MOST_STEPS = 200_000


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Report where ``boxes`` fail to cover a tensor of ``shape`` exactly.

    Takes linear time in the number of boxes, however they are arranged.

    Args:
        shape: The tensor's shape; ``()`` for a 0-dim tensor.
        boxes: Offsets and lengths of each box.

    Returns:
        ``None`` if every element lies in exactly one box, otherwise a description of the fault and its location.

    Example:
        >>> find_fault((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))]) is None
        True
        >>> find_fault((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2))])
        'nothing covers [2:3, 0:2]'
        >>> find_fault((4, 2), [((0, 0), (3, 2)), ((2, 1), (2, 1))])
        'two chunks cover [2:3, 1:2]'
    """
    for offsets, lengths in boxes:
        if not len(offsets) == len(lengths) == len(shape):
            return f"a chunk at {list(offsets)} of lengths {list(lengths)} does not have {len(shape)} dimensions"
        if any(o < 0 or n < 1 or o + n > size for o, n, size in zip(offsets, lengths, shape, strict=True)):
            return f"a chunk at {list(offsets)} of lengths {list(lengths)} does not lie inside the shape {list(shape)}"
    if not all(shape) or (len(boxes) == 1 and tuple(boxes[0][1]) == tuple(shape)) or _is_tiled(shape, boxes):
        return None
    try:
        return _Search().walk(tuple(shape), list(boxes), [])
    except _TooLongError:
        return f"its {len(boxes)} chunks leave a hole or overlap"


def _is_tiled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether the boxes' indicator functions add up to that of the whole tensor.

    Every coordinate of every axis gets a random weight; the weight of a box is the product of its extents, and weights
    add up as the functions do. Both sides are polynomials in the weights. They are equal for all weights only if the
    functions are equal (a box's corners are its monomials); otherwise they are equal by chance with a probability of
    ``len(shape) / _PRIME`` (the Schwartz-Zippel lemma).
    """
    weights: list[dict[int, int]] = [{} for _ in shape]

    def extent(axis: int, begin: int, end: int) -> int:
        table = weights[axis]
        for bound in (begin, end):
            if bound not in table:
                table[bound] = secrets.randbelow(_PRIME)
        return table[end] - table[begin]

    def weight(offsets: Sequence[int], lengths: Sequence[int]) -> int:
        product = 1
        for axis, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
            product = product * extent(axis, begin, begin + length) % _PRIME
        return product

    elements = sum(math.prod(lengths) for _, lengths in boxes)
    return elements == math.prod(shape) and (
        (sum(weight(*box) for box in boxes) - weight([0] * len(shape), shape)) % _PRIME == 0
    )


class _TooLongError(Exception):
    """The search has taken too many steps."""


class _Search:
    """Finds the first hole or overlap. Slow if many boxes begin and end side by side.

    The tensor is cut into slabs along its first axis wherever a box begins or ends. The cross-section of each slab is
    then checked in the remaining axes against the boxes that cross it.
    """

    def __init__(self) -> None:
        self._steps = 0

    def walk(self, shape: tuple[int, ...], boxes: list[Box], slabs: list[tuple[int, int]]) -> str | None:
        self._steps += 1 + len(boxes)
        if self._steps > _MOST_STEPS:
            raise _TooLongError
        axis = len(slabs)
        if len(boxes) == 1 and axis < len(shape) and boxes[0][1][axis:] == shape[axis:]:
            return None
        if not boxes or axis == len(shape):
            if len(boxes) == 1:
                return None
            location = ", ".join(f"{a}:{b}" for a, b in [*slabs, *((0, size) for size in shape[axis:])])
            return f"{'two chunks cover' if boxes else 'nothing covers'} [{location}]"
        boxes.sort(key=lambda box: box[0][axis])
        active: list[Box] = []
        position = 0
        following = 0
        while position < shape[axis]:
            while following < len(boxes) and boxes[following][0][axis] == position:
                active.append(boxes[following])
                following += 1
            until = min((o[axis] + n[axis] for o, n in active), default=shape[axis])
            if following < len(boxes):
                until = min(until, boxes[following][0][axis])
            fault = self.walk(shape, list(active), [*slabs, (position, until)])
            if fault is not None:
                return fault
            active = [box for box in active if box[0][axis] + box[1][axis] > until]
            position = until
        return None
