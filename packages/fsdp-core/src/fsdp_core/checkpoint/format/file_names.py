"""The names of a checkpoint's files. A file with another name is the user's, and no save removes it."""

from __future__ import annotations

import re
from typing import Literal

__all__ = [
    "OUR_FILES",
    "SECTIONS",
    "Section",
    "file_name",
    "file_of_rank",
    "files_of",
    "part_file",
    "rank_in",
    "state_file",
    "state_tensors_file",
    "temporary_manifest",
]

Section = Literal["model", "optimizer", "state"]
"""The folder of a tensor's files."""

SECTIONS: tuple[Section, ...] = ("model", "optimizer", "state")

_OF_RANK = re.compile(r"(.*-rank-)(\d{5,15})(\.safetensors)", re.DOTALL)
_OF_RANKS = re.compile(r".*-rank-\*\.safetensors", re.DOTALL)

OUR_FILES = (
    r"(model|optimizer|state)/(?P<chunks>[0-9a-f]{12})-rank-\d{5,}\.safetensors"
    r"|parts/(?P<parts>[0-9a-f]{12})-rank-\d{5,}\.json"
    r"|state-(?P<state>[0-9a-f]{12})\.(json|safetensors)|\.manifest-(?P<manifest>[0-9a-f]{12})\.tmp"
    r"|manifest\.json"
)
"""A regular expression for the names of what saves write, with the save's id as one of its groups."""


def files_of(section: Section, save_id: str) -> str:
    """Return the names of the files for a section's chunks, with ``*`` for the rank.

    Example:
        >>> files_of("model", "0123456789ab")
        'model/0123456789ab-rank-*.safetensors'
    """
    return f"{section}/{save_id}-rank-*.safetensors"


def file_of_rank(files: str, rank: int) -> str:
    """Return the name of one rank's file among those that :func:`files_of` names.

    Example:
        >>> file_of_rank("model/0123456789ab-rank-*.safetensors", 3)
        'model/0123456789ab-rank-00003.safetensors'

    Raises:
        ValueError: There is no place for the rank in ``files``.
    """
    if not _OF_RANKS.fullmatch(files):
        raise ValueError(f"{files!r} does not end in '-rank-*.safetensors'")
    return f"{files[: -len('*.safetensors')]}{rank:05d}.safetensors"


def file_name(section: Section, save_id: str, rank: int) -> str:
    """Return the name of the file for one rank's chunks of a section.

    Example:
        >>> file_name("model", "0123456789ab", 3)
        'model/0123456789ab-rank-00003.safetensors'
    """
    return file_of_rank(files_of(section, save_id), rank)


def rank_in(name: str) -> tuple[str, int] | None:
    """Return the files that a file of a rank is among, as :func:`files_of` names them, and the rank.

    Example:
        >>> rank_in("model/0123456789ab-rank-00003.safetensors")
        ('model/0123456789ab-rank-*.safetensors', 3)
        >>> rank_in("model/0123456789ab-rank-000003.safetensors") is None
        True
    """
    match = _OF_RANK.fullmatch(name)
    if match is None or f"{int(match[2]):05d}" != match[2]:
        return None
    return f"{match[1]}*{match[3]}", int(match[2])


def part_file(save_id: str, rank: int) -> str:
    """Return the name of the record of what one rank of a scattered save has written.

    Example:
        >>> part_file("0123456789ab", 3)
        'parts/0123456789ab-rank-00003.json'
    """
    return f"parts/{save_id}-rank-{rank:05d}.json"


def state_file(save_id: str) -> str:
    """Return the name of the file for plain data."""
    return f"state-{save_id}.json"


def state_tensors_file(save_id: str) -> str:
    """Return the name of the file for the tensors in plain data."""
    return f"state-{save_id}.safetensors"


def temporary_manifest(save_id: str) -> str:
    """Return the name of the manifest before it replaces the former one."""
    return f".manifest-{save_id}.tmp"
