"""A chunk of a stored tensor, and the names of chunks and of the files of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fsdp_core.state.coverage import Box

__all__ = ["Section", "StoredChunk", "chunk_name", "file_name", "file_of_rank", "files_of", "rank_in"]

Section = Literal["model", "optimizer", "state"]
"""The folder of a tensor's files."""

_OF_RANK = re.compile(r"(.*-rank-)(\d{5,15})(\.safetensors)", re.DOTALL)
_OF_RANKS = re.compile(r".*-rank-\*\.safetensors", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, and the location of its bytes.

    Attributes:
        file: The safetensors file, relative to the checkpoint.
        key: The box's name in that file.
        offsets: Where the box begins in the tensor.
        lengths: Its shape.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def chunk_name(key: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a chunk in its file: the tensor's key, and the chunk's offsets if it isn't the full tensor.

    A key with an ``@`` always gets the offsets, so that no two chunks share a name.

    Example:
        >>> chunk_name("model/wte.weight", (4, 2), ((2, 0), (2, 2)))
        'model/wte.weight@2,0'
    """
    offsets, lengths = box
    return key if lengths == shape and "@" not in key else f"{key}@{','.join(map(str, offsets))}"


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
