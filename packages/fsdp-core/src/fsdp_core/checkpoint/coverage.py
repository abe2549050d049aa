"""Whether boxes cover a tensor exactly: no hole, no overlap, and where the first one is."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Box", "find_fault"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the lengths of a box, one number of each per dimension."""


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say where ``boxes`` fail to cover a tensor of ``shape`` exactly.

    The tensor is cut along its first axis wherever a box begins or ends; each slab's cross-section is then covered or
    not by the boxes that cross it, in the remaining axes. Layouts that meet in practice (one box, boxes along one
    axis, a grid, flat ranges) take a time near to linear in the number of boxes.

    Args:
        shape: The tensor's shape; ``()`` for a 0-dim tensor.
        boxes: Offsets and lengths of each box.

    Returns:
        ``None`` where every element lies in exactly one box, otherwise what is wrong, and where.

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
            return f"a chunk at {list(offsets)} of lengths {list(lengths)} has not {len(shape)} dimensions"
        if any(o < 0 or n < 1 or o + n > size for o, n, size in zip(offsets, lengths, shape, strict=True)):
            return f"a chunk at {list(offsets)} of lengths {list(lengths)} does not lie inside the shape {list(shape)}"
    if not all(shape):
        return None
    return _walk(tuple(shape), list(boxes), [])


def _walk(shape: tuple[int, ...], boxes: list[Box], slabs: list[tuple[int, int]]) -> str | None:
    axis = len(slabs)
    if len(boxes) == 1 and axis < len(shape) and boxes[0][1][axis:] == shape[axis:]:
        return None
    if not boxes or axis == len(shape):
        if len(boxes) == 1:
            return None
        place = ", ".join(f"{a}:{b}" for a, b in [*slabs, *((0, size) for size in shape[axis:])])
        return f"{'two chunks cover' if boxes else 'nothing covers'} [{place}]"
    boxes.sort(key=lambda box: box[0][axis])
    active: list[Box] = []
    at, following = 0, 0
    while at < shape[axis]:
        while following < len(boxes) and boxes[following][0][axis] == at:
            active.append(boxes[following])
            following += 1
        until = min((o[axis] + n[axis] for o, n in active), default=shape[axis])
        if following < len(boxes):
            until = min(until, boxes[following][0][axis])
        fault = _walk(shape, list(active), [*slabs, (at, until)])
        if fault is not None:
            return fault
        active = [box for box in active if box[0][axis] + box[1][axis] > until]
        at = until
    return None
