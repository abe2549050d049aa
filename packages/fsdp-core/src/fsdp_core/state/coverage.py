"""Checks that boxes cover a tensor exactly, and locates the first hole or overlap."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

__all__ = ["Box", "find_fault"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the lengths of a box, one number of each per dimension."""

_PRIME = 2**127 - 1
_MAX_STEPS = 200_000


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
    """Return whether the boxes' indicator functions add up to that of the full tensor.

    Every bound of a box gets a random number, and the weight of a box is the product, over the axes, of the difference
    between its bounds' numbers. So the weights of adjacent boxes add up to that of their union. The sum of all weights
    and the weight of the full tensor are polynomials in these numbers, with the boxes' corners as monomials. They are
    the same polynomial only if the indicator functions are the same; otherwise their values are equal by chance with a
    probability of at most ``len(shape) / _PRIME`` (the Schwartz-Zippel lemma).
    """
    weights: list[dict[int, int]] = [{} for _ in shape]

    def extent(axis: int, begin: int, end: int) -> int:
        weight_of_bound = weights[axis]
        for bound in (begin, end):
            if bound not in weight_of_bound:
                weight_of_bound[bound] = secrets.randbelow(_PRIME)
        return weight_of_bound[end] - weight_of_bound[begin]

    def weight(offsets: Sequence[int], lengths: Sequence[int]) -> int:
        product = 1
        for axis, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
            product = product * extent(axis, begin, begin + length) % _PRIME
        return product

    if sum(math.prod(lengths) for _, lengths in boxes) != math.prod(shape):
        return False
    return (sum(weight(*box) for box in boxes) - weight([0] * len(shape), shape)) % _PRIME == 0


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
        """Describe the first fault inside nested slabs, one per axis so far; ``None`` if there is none."""
        self._steps += 1 + len(boxes)
        if self._steps > _MAX_STEPS:
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
        crossing_boxes: list[Box] = []
        position = 0
        next_box = 0
        while position < shape[axis]:
            while next_box < len(boxes) and boxes[next_box][0][axis] == position:
                crossing_boxes.append(boxes[next_box])
                next_box += 1
            slab_end = min((o[axis] + n[axis] for o, n in crossing_boxes), default=shape[axis])
            if next_box < len(boxes):
                slab_end = min(slab_end, boxes[next_box][0][axis])
            fault = self.walk(shape, list(crossing_boxes), [*slabs, (position, slab_end)])
            if fault is not None:
                return fault
            crossing_boxes = [box for box in crossing_boxes if box[0][axis] + box[1][axis] > slab_end]
            position = slab_end
        return None
