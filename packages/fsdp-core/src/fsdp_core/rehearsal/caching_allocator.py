"""What torch's allocator for CUDA takes from the driver for the tensors of a step: rounded sizes, segments, gaps.

Read in ``CUDACachingAllocator.cpp`` and ``AllocatorConfig.h`` of torch 2.13, for default settings and one stream.
No card has confirmed it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from fsdp_core.rehearsal.memory import StepRecord

__all__ = ["CachingAllocator", "reserved_bytes"]

_MIB = 1 << 20

#: ``kMinBlockSize``: sizes are multiples of it.
_ROUNDING = 512

#: ``kSmallSize``: up to this size, blocks come from segments of ``kSmallBuffer``.
_LARGEST_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB

#: ``kMinLargeAlloc``: below this size, blocks come from segments of ``kLargeBuffer``; above, they have their own.
_LEAST_OWN, _LARGE_SEGMENT, _OWN_ROUNDING = 10 * _MIB, 20 * _MIB, 2 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    """Part of a segment.

    Attributes:
        size: Its bytes.
        is_small: Whether its segment is of small blocks.
        is_free: Whether nothing is in it.
        before: The block before it in the segment.
        after: The block after it.
    """

    size: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Gives blocks to tensors as torch does, and keeps what it has taken from the driver.

    Attributes:
        reserved: The bytes that it has taken.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("weight", 3_000_000)
        >>> allocator.reserved
        20971520
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._blocks: dict[object, _Block] = {}
        self._free: dict[bool, list[_Block]] = {True: [], False: []}

    def allocate(self, key: object, nbytes: int) -> None:
        """Take the smallest free block that is large enough, or a new segment. The rest of it stays free.

        Args:
            key: What frees it.
            nbytes: The bytes of the tensor.
        """
        size = -(-nbytes // _ROUNDING) * _ROUNDING
        is_small = size <= _LARGEST_SMALL
        free = self._free[is_small]
        index = bisect_left(free, size, key=_SIZE)
        if index < len(free):
            block = free.pop(index)
        else:
            block = _Block(_segment_size(size), is_small)
            self.reserved += block.size
        rest = block.size - size
        if rest >= _ROUNDING if is_small else rest > _LARGEST_SMALL:
            block.size = size
            remaining = _Block(rest, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remaining
            block.after = remaining
            self._set_free(remaining)
        block.is_free = False
        self._blocks[key] = block

    def free(self, key: object) -> None:
        """Free a block, and join it with free ones beside it.

        Args:
            key: As given to :meth:`allocate`.
        """
        block = self._blocks.pop(key)
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._free[block.is_small].remove(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        self._set_free(block)

    def _set_free(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], block, key=_SIZE)


_SIZE = attrgetter("size")


def _segment_size(size: int) -> int:
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _LEAST_OWN:
        return _LARGE_SEGMENT
    return -(-size // _OWN_ROUNDING) * _OWN_ROUNDING


def reserved_bytes(step: StepRecord, device: str) -> int:
    """What the allocator takes from the driver until the end of a step.

    Args:
        step: The step.
        device: The kind of device on which its tensors are counted.
    """
    allocator = CachingAllocator()
    sizes: dict[object, int] = {}

    def resize(key: object, nbytes: int) -> None:
        if sizes.get(key):
            allocator.free(key)
        if nbytes:
            allocator.allocate(key, nbytes)
        sizes[key] = nbytes

    for allocation, nbytes in step.start:
        if allocation.device == device:
            resize(allocation, nbytes)
    for change in step.changes:
        if change.allocation.device == device:
            resize(change.allocation, sizes.get(change.allocation, 0) + change.delta)
    return allocator.reserved
