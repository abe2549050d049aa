"""Reads patterns, which may be made up by anybody, and checks that their files exist."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

from fsdp_core.checkpoint.format.chunks import file_of_rank, rank_in
from fsdp_core.checkpoint.format.json_text import listed, whole
from fsdp_core.checkpoint.format.patterns import Pattern, PatternedChunks, Ranks, Sizes

__all__ = ["PatternedFiles", "read_pattern"]

MAX_LOOKED_UP = 2**24
"""How many files of patterns are looked up one by one, where those of other ranks are missing."""


def read_pattern(shape: tuple[int, ...], chunks: Mapping[str, Any], patterns: dict[str, Pattern]) -> Pattern:
    """Read a pattern.

    Args:
        shape: The tensor's shape.
        chunks: The pattern's object.
        patterns: The patterns that were read already, which tensors share; this one is put into it.

    Raises:
        ValueError: It is no pattern, or does not fit the shape.
    """
    cut = {name: chunks[name] for name in ("grid", "runs", "ranks") if name in chunks}
    known = f"{shape} {cut}"
    if known not in patterns:
        grid, runs = cut.get("grid"), cut.get("runs")
        patterns[known] = Pattern(
            shape=shape,
            ranks=Ranks(tuple((whole(a), whole(b), whole(c)) for a, b, c in map(listed, listed(chunks["ranks"])))),
            grid=None if grid is None else tuple(map(_sizes, listed(grid))),
            runs=None if runs is None else _sizes(runs),
        )
    return patterns[known]


def _sizes(runs: Any) -> Sizes:
    return Sizes(tuple((whole(length), whole(count)) for length, count in map(listed, listed(runs))))


class PatternedFiles:
    """Finds out whether the files of patterns exist, without looking each of them up for each tensor.

    Args:
        files: The files of a checkpoint, by name.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._ranks: dict[str, list[int]] = {}
        for name in files:
            if (of_rank := rank_in(name)) is not None:
                self._ranks.setdefault(of_rank[0], []).append(of_rank[1])
        for ranks in self._ranks.values():
            ranks.sort()
        self._exist: set[tuple[str, Ranks]] = set()
        self._left = MAX_LOOKED_UP

    def lacking(self, chunks: PatternedChunks) -> str | None:
        """Return the name of a file that does not exist; ``None`` if all do."""
        known = chunks.files, chunks.pattern.ranks
        if known in self._exist:
            return None
        there = self._ranks.get(chunks.files, [])
        for first, step, count in chunks.pattern.ranks.runs:
            last = first + step * (count - 1)
            begin, end = bisect_left(there, first), bisect_right(there, last)
            if end - begin == last - first + 1:  # also those between
                continue
            self._left -= 1 if step == 0 else count
            if self._left < 0:
                raise ValueError(f"its ranks are in more than {MAX_LOOKED_UP} places beside ranks without a file")
            for rank in (first,) if step == 0 else range(first, last + 1, step):
                at = bisect_left(there, rank)
                if at == len(there) or there[at] != rank:
                    return file_of_rank(chunks.files, rank)
        file_of_rank(chunks.files, 0)  # raises if the name has no place for a rank
        self._exist.add(known)
        return None
