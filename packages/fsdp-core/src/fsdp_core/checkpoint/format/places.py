"""Where the ranks of a scattered save have written, as the manifest says it, for those who look for the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_core.checkpoint.format.file_names import split_off_rank
from fsdp_core.checkpoint.format.json_text import integer, json_list, string
from fsdp_core.checkpoint.format.patterns import Ranks

__all__ = ["PlaceOfRanks", "describe_ranks", "group_places", "place_of"]

_MAX_NAME_LENGTH = 4096
_MOST_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class PlaceOfRanks:
    """A folder that some ranks of a scattered save have written to.

    Attributes:
        host: The name of their host.
        path: The folder there, as an absolute path or an fsspec URL.
        ranks: The ranks.

    Example:
        >>> place = PlaceOfRanks(host="gpu07", path="/scratch/run1.ckpt", ranks=Ranks(((2, 1, 2), (8, 2, 3))))
        >>> print(place)
        rank 2-3, 8, 10, 12 on gpu07, to /scratch/run1.ckpt
        >>> PlaceOfRanks.from_json(place.to_json(), 16) == place
        True
    """

    host: str
    path: str
    ranks: Ranks

    def __str__(self) -> str:
        return f"rank {self.shown_ranks} on {self.host or 'a host without a name'}, to {self.path}"

    @property
    def shown_ranks(self) -> str:
        """The ranks for people, such as ``"0-7, 16"``."""
        return describe_ranks(self.ranks)

    def holds(self, rank: int) -> bool:
        """Whether a rank has written there."""
        return next(self.ranks.pieces_of(rank), None) is not None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {"host": self.host, "path": self.path, "ranks": [list(run) for run in self.ranks.runs]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], world_size: int) -> PlaceOfRanks:
        """Read the manifest's entry.

        Raises:
            ValueError: It is none, or names ranks that there are not.
        """
        host, path = string(entry["host"]), string(entry["path"])
        if max(len(host), len(path)) > _MAX_NAME_LENGTH:
            raise ValueError(f"a place has a name of more than {_MAX_NAME_LENGTH} characters")
        runs = [[integer(number) for number in json_list(run)] for run in json_list(entry["ranks"])]
        if any(len(run) != 3 for run in runs):
            raise ValueError("the ranks of a place are not in runs of first, step and count")
        ranks = Ranks(tuple((first, step, count) for first, step, count in runs))
        if not runs or any(first + step * (count - 1) >= world_size for first, step, count in runs):
            raise ValueError(f"a place has ranks that a world of {world_size} has not")
        if any(step == 0 and count > 1 for _, step, count in runs):
            raise ValueError("a place names a rank twice")
        return cls(host=host, path=path, ranks=ranks)


def place_of(places: Sequence[PlaceOfRanks], name: str) -> PlaceOfRanks | None:
    """Return where a file was written, by the rank in its name; ``None`` if that is not known.

    Files without a rank, which hold plain data, are rank 0's.
    """
    file_pattern_and_rank = split_off_rank(name)
    rank = 0 if file_pattern_and_rank is None else file_pattern_and_rank[1]
    return next((place for place in places if place.holds(rank)), None)


def group_places(hosts_and_paths: Iterable[tuple[str, str]]) -> tuple[PlaceOfRanks, ...]:
    """Return the places of ranks.

    Args:
        hosts_and_paths: By rank, its host and its folder there.

    Example:
        >>> [str(place) for place in group_places([("a", "/x"), ("a", "/x"), ("b", "/x")])]
        ['rank 0-1 on a, to /x', 'rank 2 on b, to /x']
    """
    ranks_of_place: dict[tuple[str, str], list[int]] = {}
    for rank, host_and_path in enumerate(hosts_and_paths):
        ranks_of_place.setdefault(host_and_path, []).append(rank)
    return tuple(
        PlaceOfRanks(host=host, path=path, ranks=Ranks.of(place_ranks))
        for (host, path), place_ranks in ranks_of_place.items()
    )


def describe_ranks(ranks: Ranks) -> str:
    """Return ranks for people, such as ``"0-7, 16"``."""
    words = list(_in_words(ranks))
    return ", ".join(words[:_MOST_SHOWN]) + (" and more" if len(words) > _MOST_SHOWN else "")


def _in_words(ranks: Ranks) -> Iterator[str]:
    for first, step, count in ranks.runs[: _MOST_SHOWN + 1]:
        if step == 1 and count > 1:
            yield f"{first}-{first + count - 1}"
        else:
            yield from (str(first + step * number) for number in range(min(count, _MOST_SHOWN + 1)))
