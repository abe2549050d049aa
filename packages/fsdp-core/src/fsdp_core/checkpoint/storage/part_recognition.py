"""Recognizes a place of a scattered save: it holds files of some ranks, and the manifest is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from fsdp_core.checkpoint.format.file_names import split_off_rank
from fsdp_core.checkpoint.format.manifest import Manifest
from fsdp_core.checkpoint.format.part_record import MAX_RECORD_BYTES, PartRecord
from fsdp_core.checkpoint.format.patterns import Ranks
from fsdp_core.checkpoint.format.places import describe_ranks, place_of
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.writers import writer_of

__all__ = ["describe_part", "describe_rest", "gather_command", "holds_rank_record", "records_in", "saves_in"]

_RECORD = re.compile(r"parts/(?P<save>[0-9a-f]{12})-rank-(?P<rank>\d{5,15})\.json")
_MOST_SHOWN = 4


def saves_in(names: Collection[str]) -> dict[str, list[int]]:
    """Return the ranks whose records a place holds, by save id.

    Example:
        >>> saves_in(["parts/0123456789ab-rank-00003.json", "model/0123456789ab-rank-00003.safetensors"])
        {'0123456789ab': [3]}
    """
    ranks_of_save: dict[str, list[int]] = {}
    for name in sorted(names):
        if (record := _RECORD.fullmatch(name)) is not None:
            ranks_of_save.setdefault(record["save"], []).append(int(record["rank"]))
    return ranks_of_save


def holds_rank_record(names: Collection[str]) -> bool:
    """Return whether a folder without a manifest is a place of a scattered save that was published there.

    A place with a writer's mark may have been left by a save that was interrupted before rank 0 has written the
    manifest.

    Args:
        names: The files in it.
    """
    return bool(saves_in(names)) and not any(writer_of(name) is not None for name in names)


def records_in(folder: Folder, save_id: str, names: Collection[str]) -> list[PartRecord]:
    """Read the records of a save in a place; those that can't be read are left out.

    Args:
        folder: The place.
        save_id: The save.
        names: The files in it.
    """
    records = []
    for name in sorted(names):
        record = _RECORD.fullmatch(name)
        if record is None or record["save"] != save_id:
            continue
        try:
            size = folder.size(name)
            if size is not None and 0 < size <= MAX_RECORD_BYTES:
                records.append(PartRecord.from_json(folder.read(name)))
        except (ValueError, OSError):  # a link that leads out of the folder is refused with one of them
            continue
    return records


def describe_part(folder: Folder, names: Collection[str]) -> str | None:
    """Describe a place without a manifest: whose files it holds, and where the manifest is.

    Args:
        folder: The place.
        names: The files in it.

    Returns:
        Sentences that say what to type; ``None`` if it is no such place.
    """
    saves = saves_in(names)
    if not saves:
        return None
    sentences = []
    for save_id, ranks in list(saves.items())[:_MOST_SHOWN]:
        shown_ranks = describe_ranks(Ranks.of(ranks))
        text = f"it holds what rank {shown_ranks} wrote of the scattered save {save_id}"
        records = records_in(folder, save_id, names)
        if records:
            record = records[0]
            text += (
                f", of {record.world_size} ranks, on {record.host or 'a host without a name'}. Rank 0 wrote the "
                f"manifest on {record.manifest_host or 'a host without a name'}, to {record.manifest_path}"
            )
        sentences.append(text)
    more = f" and of {len(saves) - _MOST_SHOWN} more" if len(saves) > _MOST_SHOWN else ""
    unfinished = ""
    if not holds_rank_record(names):
        unfinished = " That save is still running, or was interrupted."
    return f"{'; '.join(sentences)}{more}.{unfinished}\n{gather_command([str(folder)])}"


def describe_rest(folder: Folder, manifest: Manifest, missing: Sequence[str]) -> str:
    """Say where the files of a scattered checkpoint are that a place does not hold.

    Args:
        folder: The place, or several.
        manifest: The manifest, which says where ranks have written.
        missing: The files that are missing there.
    """
    missing_places: list[str] = []
    for name in missing:
        writer = _describe_writer(manifest, name)
        if writer not in missing_places:
            missing_places.append(writer)
        if len(missing_places) > _MOST_SHOWN:
            break
    places: Sequence[Folder] = getattr(folder, "places", (folder,))  # of a JoinedFolder, several
    more = [f"  … and {len(missing)} files in all"] if len(missing_places) > _MOST_SHOWN else []
    return "\n".join(
        [
            f"{folder} is a place of the scattered save {manifest.save_id}, and not all of it: of "
            f"{len(manifest.files)} files, {len(missing)} {'is' if len(missing) == 1 else 'are'} missing, written by",
            *(f"  {place_text}" for place_text in missing_places[:_MOST_SHOWN]),
            *more,
            gather_command([str(place) for place in places]),
        ]
    )


def _describe_writer(manifest: Manifest, name: str) -> str:
    """Say where a file was written, or by which rank if the manifest does not know the place."""
    place = place_of(manifest.places, name)
    if place is not None:
        return str(place)
    pattern_and_rank = split_off_rank(name)
    rank = 0 if pattern_and_rank is None else pattern_and_rank[1]
    return f"rank {rank}"


def gather_command(paths: Sequence[str]) -> str:
    """Say how places are joined.

    Args:
        paths: Those that are known, of which at most four are shown.
    """
    listed = " ".join(paths[:_MOST_SHOWN])
    return (
        "Bring the folders of all hosts to where one process sees them, and join them: "
        f"fsdp checkpoint gather {listed} … OUT"
    )
