"""The names of a checkpoint's files. A file with another name is the user's, and no save removes it."""

from __future__ import annotations

import re
from typing import Literal

__all__ = [
    "SECTIONS",
    "WRITER_TOKEN",
    "Section",
    "file_name",
    "file_of_rank",
    "files_of",
    "is_ours",
    "name_in_save",
    "part_file",
    "save_id_of",
    "split_off_rank",
    "state_file",
    "state_tensors_file",
    "temporary_manifest",
]

Section = Literal["model", "optimizer", "state"]
"""The folder of a tensor's files."""

SECTIONS: tuple[Section, ...] = ("model", "optimizer", "state")

_RANK_FILE = re.compile(r"(.*-rank-)(\d{5,15})(\.safetensors)", re.DOTALL)
_RANK_FILES = re.compile(r".*-rank-\*\.safetensors", re.DOTALL)

WRITER_TOKEN = r"[0-9a-f]{12}-[0-9a-f]{12}-[0-9a-f]{12}-[1-9]\d{0,8}-\d{1,20}-[A-Za-z0-9.-]{0,64}"
"""A regular expression for the token that identifies a writing process, in the names of the files that it marks."""

#: The names of the files that saves write, each with the save's id where the name has one.
_OUR_FILES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(model|optimizer|state)/(?P<save_id>[0-9a-f]{12})-rank-\d{5,}\.safetensors",
        r"parts/(?P<save_id>[0-9a-f]{12})-rank-\d{5,}\.json",
        r"state-(?P<save_id>[0-9a-f]{12})\.(json|safetensors)",
        r"\.manifest-(?P<save_id>[0-9a-f]{12})\.tmp",
        r"manifest\.json",
        rf"\.writer-{WRITER_TOKEN}",  # marks a checkpoint while a save overwrites it
    )
)


def is_ours(name: str) -> bool:
    """Return whether a file name is one that a save gives.

    Example:
        >>> is_ours("model/0123456789ab-rank-00000.safetensors"), is_ours("model/weights.bin")
        (True, False)
    """
    return any(pattern.fullmatch(name) for pattern in _OUR_FILES)


def save_id_of(name: str) -> str | None:
    """Return the id of the save that a file belongs to, by its name.

    Example:
        >>> save_id_of("model/0123456789ab-rank-00000.safetensors"), save_id_of("manifest.json")
        ('0123456789ab', None)
    """
    for pattern in _OUR_FILES:
        match = pattern.fullmatch(name)
        if match is not None:
            return match.groupdict().get("save_id")
    return None


def name_in_save(name: str, save_id: str) -> str:
    """Return the name that a file has in another save.

    Example:
        >>> name_in_save("state-0123456789ab.json", "ba9876543210")
        'state-ba9876543210.json'
    """
    former_id = save_id_of(name)
    return name if former_id is None else name.replace(former_id, save_id)


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
    if not _RANK_FILES.fullmatch(files):
        raise ValueError(f"{files!r} does not end in '-rank-*.safetensors'")
    return f"{files[: -len('*.safetensors')]}{rank:05d}.safetensors"


def file_name(section: Section, save_id: str, rank: int) -> str:
    """Return the name of the file for one rank's chunks of a section.

    Example:
        >>> file_name("model", "0123456789ab", 3)
        'model/0123456789ab-rank-00003.safetensors'
    """
    return file_of_rank(files_of(section, save_id), rank)


def split_off_rank(name: str) -> tuple[str, int] | None:
    """Split the name of a rank's file into a pattern for all ranks' files, as of :func:`files_of`, and the rank.

    Example:
        >>> split_off_rank("model/0123456789ab-rank-00003.safetensors")
        ('model/0123456789ab-rank-*.safetensors', 3)
        >>> split_off_rank("model/0123456789ab-rank-000003.safetensors") is None
        True
    """
    match = _RANK_FILE.fullmatch(name)
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
