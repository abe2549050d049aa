"""Reads patterns, which may be made up by anybody, and checks that their files exist."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

from fsdp_core.checkpoint.format.file_names import file_of_rank, split_off_rank
from fsdp_core.checkpoint.format.json_text import integer, json_list
from fsdp_core.checkpoint.format.patterns import Pattern, PatternedChunks, Ranks, Sizes

__all__ = ["PatternedFiles", "read_pattern"]

MAX_LOOKED_UP = 2**24
"""How many files may be looked up one by one, which is needed if some ranks between those of a pattern have no file."""


def read_pattern(shape: tuple[int, ...], chunks: Mapping[str, Any], patterns: dict[str, Pattern]) -> Pattern:
    """Read a pattern.

    Args:
        shape: The tensor's shape.
        chunks: The pattern's object.
        patterns: The patterns that were read already, which tensors share; this one is put into it.

    Raises:
        ValueError: It is no pattern, or does not fit the shape.
    """
    fields = {name: chunks[name] for name in ("grid", "runs", "ranks") if name in chunks}
    cache_key = f"{shape} {fields}"
    if cache_key not in patterns:
        grid, runs = fields.get("grid"), fields.get("runs")
        rank_runs = map(json_list, json_list(chunks["ranks"]))
        patterns[cache_key] = Pattern(
            shape=shape,
            ranks=Ranks(tuple((integer(first), integer(step), integer(count)) for first, step, count in rank_runs)),
            grid=None if grid is None else tuple(map(_sizes, json_list(grid))),
            runs=None if runs is None else _sizes(runs),
        )
    return patterns[cache_key]


def _sizes(runs: Any) -> Sizes:
    return Sizes(tuple((integer(length), integer(count)) for length, count in map(json_list, json_list(runs))))


class PatternedFiles:
    """Finds out whether the files of patterns exist, without looking each of them up for each tensor.

    Args:
        files: The files of a checkpoint, by name.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._ranks: dict[str, list[int]] = {}
        for name in files:
            files_and_rank = split_off_rank(name)
            if files_and_rank is not None:
                files_of_ranks, rank = files_and_rank
                self._ranks.setdefault(files_of_ranks, []).append(rank)
        for ranks in self._ranks.values():
            ranks.sort()
        self._complete: set[tuple[str, Ranks]] = set()
        self._lookups_left = MAX_LOOKED_UP

    def missing_file(self, chunks: PatternedChunks) -> str | None:
        """Return the name of a file that does not exist; ``None`` if all do."""
        cache_key = chunks.files, chunks.pattern.ranks
        if cache_key in self._complete:
            return None
        ranks_with_file = self._ranks.get(chunks.files, [])
        for first, step, count in chunks.pattern.ranks.runs:
            last = first + step * (count - 1)
            begin, end = bisect_left(ranks_with_file, first), bisect_right(ranks_with_file, last)
            if end - begin == last - first + 1:  # every rank from the first to the last has a file
                continue
            self._lookups_left -= 1 if step == 0 else count
            if self._lookups_left < 0:
                raise ValueError(f"its ranks are in more than {MAX_LOOKED_UP} places beside ranks without a file")
            ranks = (first,) if step == 0 else range(first, last + 1, step)
            for rank in ranks:
                index = bisect_left(ranks_with_file, rank)
                if index == len(ranks_with_file) or ranks_with_file[index] != rank:
                    return file_of_rank(chunks.files, rank)
        file_of_rank(chunks.files, 0)  # raises if the name has no place for a rank
        self._complete.add(cache_key)
        return None
