"""Chunks in a pattern: a grid, or runs of consecutive elements, whose files and offsets are computed when needed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, overload

from fsdp_core.checkpoint.format.chunks import StoredChunk, chunk_name
from fsdp_core.checkpoint.format.file_names import file_of_rank, split_off_rank
from fsdp_core.state.boxes import boxes, overlap
from fsdp_core.state.coverage import Box

__all__ = ["MAX_PIECES", "Pattern", "PatternedChunks", "Ranks", "Sizes"]

MAX_PIECES = 2**22
"""The maximum number of pieces of one tensor."""


@dataclass(frozen=True)
class Sizes:
    """Consecutive lengths, such as those of the rows of each rank, in runs of equal ones.

    Attributes:
        runs: A length and how many there are of it, for each run.

    Example:
        >>> rows = Sizes(((8, 3), (2, 1)))
        >>> rows.count, rows.total, rows.at(3), rows.overlapping(7, 9)
        (4, 26, (24, 2), range(0, 2))
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not all(length >= 1 and count >= 1 for length, count in self.runs):
            raise ValueError(f"{[list(run) for run in self.runs[:4]]} are no lengths with counts")
        if self.count > MAX_PIECES:
            raise ValueError(f"it is cut into {self.count} pieces, and the limit is {MAX_PIECES}")

    @cached_property
    def _counts(self) -> list[int]:
        return list(accumulate((count for _, count in self.runs), initial=0))

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate((length * count for length, count in self.runs), initial=0))

    @property
    def count(self) -> int:
        """How many lengths there are."""
        return self._counts[-1]

    @property
    def total(self) -> int:
        """Their sum."""
        return self._begins[-1]

    def at(self, number: int) -> tuple[int, int]:
        """Where a piece begins, and its length."""
        run = bisect_right(self._counts, number) - 1
        length = self.runs[run][0]
        return self._begins[run] + (number - self._counts[run]) * length, length

    def overlapping(self, begin: int, end: int) -> range:
        """The numbers of the pieces that overlap a range, which must lie inside and not be empty."""
        return range(self._number_at(begin), self._number_at(end - 1) + 1)

    def _number_at(self, position: int) -> int:
        run = bisect_right(self._begins, position) - 1
        return self._counts[run] + (position - self._begins[run]) // self.runs[run][0]


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold consecutive pieces, in runs of equal steps.

    Attributes:
        runs: The first rank, the step from each to the next, and how many there are, for each run.

    Example:
        >>> ranks = Ranks(((0, 2, 3), (1, 2, 3)))
        >>> [ranks.at(number) for number in range(ranks.count)], list(ranks.pieces_of(3))
        ([0, 2, 4, 1, 3, 5], [4])
    """

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not all(first >= 0 and step >= 0 and count >= 1 for first, step, count in self.runs):
            raise ValueError(f"{[list(run) for run in self.runs[:4]]} are no ranks with steps and counts")

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Ranks:
        """Divide ranks into runs of equal steps.

        Example:
            >>> Ranks.of([0, 2, 4, 1, 3, 5]).runs
            ((0, 2, 3), (1, 2, 3))
        """
        runs: list[tuple[int, int, int]] = []
        for rank in ranks:
            if runs:
                first, step, count = runs[-1]
                if count == 1 and rank >= first:
                    runs[-1] = first, rank - first, 2
                    continue
                if count > 1 and rank == first + step * count:
                    runs[-1] = first, step, count + 1
                    continue
            runs.append((rank, 1, 1))
        return cls(tuple(runs))

    @cached_property
    def _counts(self) -> list[int]:
        return list(accumulate((count for *_, count in self.runs), initial=0))

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return self._counts[-1]

    def at(self, number: int) -> int:
        """The rank that holds a piece."""
        run = bisect_right(self._counts, number) - 1
        first, step, _ = self.runs[run]
        return first + (number - self._counts[run]) * step

    def pieces_of(self, rank: int) -> Iterator[int]:
        """The numbers of the pieces that a rank holds."""
        for first_piece, (first, step, count) in zip(self._counts, self.runs, strict=False):
            if step == 0:
                if rank == first:
                    yield from range(first_piece, first_piece + count)
            elif first <= rank <= first + step * (count - 1) and (rank - first) % step == 0:
                yield first_piece + (rank - first) // step


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How tensors of one shape are cut into pieces, and which rank holds which. The pieces cover the tensor exactly.

    Attributes:
        shape: The shape of the tensors.
        ranks: The ranks that hold the pieces, in row-major order.
        grid: For each dimension, the lengths into which it is cut; a piece is a cell. ``None`` for runs.
        runs: The numbers of consecutive elements, in row-major order; a piece is one run, which is stored as the boxes
            into which :func:`~fsdp_core.state.boxes.boxes` cuts it. ``None`` for a grid.

    Raises:
        ValueError: The pieces don't cover the shape, or there are not as many as ranks.
    """

    shape: tuple[int, ...]
    ranks: Ranks
    grid: tuple[Sizes, ...] | None = None
    runs: Sizes | None = None

    def __post_init__(self) -> None:
        if (self.grid is None) == (self.runs is None):
            raise ValueError("its chunks are either a grid or runs of elements")
        if self.grid is not None:
            is_covered = tuple(sizes.total for sizes in self.grid) == self.shape
        else:
            is_covered = self.runs is not None and self.runs.total == math.prod(self.shape)
        if not is_covered or 0 in self.shape:
            raise ValueError(f"its pieces do not cover the shape {list(self.shape)}")
        if self.pieces != self.ranks.count or self.pieces > MAX_PIECES:
            raise ValueError(f"it is cut into {self.pieces} pieces, which {self.ranks.count} ranks hold")

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        if self.runs is not None:
            return self.runs.count
        return math.prod(sizes.count for sizes in self.grid or ())

    @cached_property
    def count(self) -> int:
        """The number of boxes."""
        return self.pieces if self.runs is None else sum(len(self.boxes_of(n)) for n in range(self.pieces))

    def boxes_of(self, number: int) -> tuple[Box, ...]:
        """The boxes of a piece."""
        if self.runs is not None:
            return tuple((offsets, lengths) for offsets, lengths, _ in boxes(self.shape, *self.runs.at(number)))
        cell: list[tuple[int, int]] = []  # where it begins and its length, by dimension, the last dimension first
        for sizes in reversed(self.grid or ()):
            number, index = divmod(number, sizes.count)
            cell.append(sizes.at(index))
        cell.reverse()
        return ((tuple(begin for begin, _ in cell), tuple(length for _, length in cell)),)

    def overlapping(self, box: Box) -> Iterator[int]:
        """The numbers of the pieces that may overlap a box, which must lie inside the shape."""
        offsets, lengths = box
        if 0 in lengths:
            return
        if self.runs is not None:
            last_index = [offset + length - 1 for offset, length in zip(offsets, lengths, strict=True)]
            yield from self.runs.overlapping(self._flat_index(offsets), self._flat_index(last_index) + 1)
            return
        grid = self.grid or ()
        pieces_by_axis = [sizes.overlapping(o, o + n) for sizes, o, n in zip(grid, offsets, lengths, strict=True)]
        for cell in product(*pieces_by_axis):
            number = 0
            for sizes, index in zip(grid, cell, strict=True):
                number = number * sizes.count + index
            yield number

    def _flat_index(self, index: Sequence[int]) -> int:
        position = 0
        for coordinate, size in zip(index, self.shape, strict=True):
            position = position * size + coordinate
        return position

    def to_json(self) -> dict[str, Any]:
        """The pattern in JSON types, without the shape."""
        if self.grid is not None:
            return {"grid": [sizes.runs for sizes in self.grid], "ranks": self.ranks.runs}
        assert self.runs is not None
        return {"runs": self.runs.runs, "ranks": self.ranks.runs}


@dataclass(frozen=True, eq=False)
class PatternedChunks(Sequence[StoredChunk]):
    """The chunks of one tensor, made when they are looked at.

    Attributes:
        key: The tensor's key.
        files: The names of the files, with ``*`` for the rank.
        pattern: The boxes, and which rank holds which.
    """

    key: str
    files: str
    pattern: Pattern

    def _chunks_of(self, number: int) -> Iterator[StoredChunk]:
        file = file_of_rank(self.files, self.pattern.ranks.at(number))
        for box in self.pattern.boxes_of(number):
            name = chunk_name(self.key, self.pattern.shape, box)
            yield StoredChunk(file=file, key=name, offsets=box[0], lengths=box[1])

    def __iter__(self) -> Iterator[StoredChunk]:
        for number in range(self.pattern.pieces):
            yield from self._chunks_of(number)

    def __len__(self) -> int:
        return self.pattern.count

    @overload
    def __getitem__(self, index: int) -> StoredChunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StoredChunk, ...]: ...
    def __getitem__(self, index: int | slice) -> StoredChunk | tuple[StoredChunk, ...]:
        if isinstance(index, int) and self.pattern.runs is None:  # each piece of a grid is one chunk
            number = range(self.pattern.pieces)[index]
            return next(self._chunks_of(number))
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PatternedChunks):
            return (self.key, self.files, self.pattern) == (other.key, other.files, other.pattern)
        return isinstance(other, tuple) and len(self) == len(other) and tuple(self) == other

    def __hash__(self) -> int:
        return hash((self.key, self.files, self.pattern))

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """Yield the chunks that overlap a box."""
        for number in self.pattern.overlapping(box):
            for chunk in self._chunks_of(number):
                if overlap((chunk.offsets, chunk.lengths), box) is not None:
                    yield chunk

    def in_file(self, name: str) -> Iterator[StoredChunk]:
        """Yield the chunks in a file."""
        file_pattern_and_rank = split_off_rank(name)
        if file_pattern_and_rank is not None and file_pattern_and_rank[0] == self.files:
            for number in self.pattern.ranks.pieces_of(file_pattern_and_rank[1]):
                yield from self._chunks_of(number)

    def file_names(self) -> set[str]:
        """The names of all files."""
        return set(_file_names(self.files, self.pattern.ranks))


@lru_cache(maxsize=64)  # tensors share their ranks
def _file_names(files: str, ranks: Ranks) -> frozenset[str]:
    return frozenset(file_of_rank(files, ranks.at(number)) for number in range(ranks.count))
