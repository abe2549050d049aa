"""The places of a scattered save as one folder, for readers: each file is read where it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.format.part_record import PartRecord
from fsdp_core.checkpoint.storage.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.part_recognition import records_in, saves_in
from fsdp_core.checkpoint.storage.recognition import manifest_bytes, save_id_in, save_id_of
from fsdp_core.errors import CheckpointFormatError

__all__ = ["JoinedFolder", "Paths", "open_places", "paths_of", "shown_paths"]

Paths = StrPath | Sequence[StrPath]
"""A checkpoint's path; or several, the places of a scattered save."""


@dataclass(frozen=True, kw_only=True)
class JoinedFolder(Folder):
    """Several folders, of which each file is read from one.

    Attributes:
        places: The folders. ``root`` and ``fs`` are those of the one with the manifest.
        held: The files of each.
        chosen: The place to read a file from, by name, if it is not the first that has it.
    """

    places: tuple[Folder, ...]
    held: tuple[frozenset[str], ...] = field(repr=False)
    chosen: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return " and ".join(map(str, self.places))

    def holders(self, name: str) -> list[int]:
        """Return the numbers of the places that have a file of this name."""
        return [number for number, names in enumerate(self.held) if name in names]

    def holder(self, name: str) -> Folder:
        """Return the place to read a file from; the first if none has it."""
        if name == MANIFEST:
            return Folder(fs=self.fs, root=self.root, local=self._local_manifest)
        return self.places[self.chosen.get(name, next(iter(self.holders(name)), 0))]

    @property
    def _local_manifest(self) -> bool:
        return next(place.local for place in self.places if (place.fs, place.root) == (self.fs, self.root))

    def path(self, name: str) -> str:
        return self.holder(name).path(name)

    def files(self) -> list[str]:
        return sorted(set().union(*self.held))

    def size(self, name: str) -> int | None:
        return self.holder(name).size(name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.holder(name).read(name, start, end)


def shown_paths(paths: Paths) -> str:
    """Return paths as text for messages."""
    return " and ".join(os.fspath(path) for path in _each(paths))


def paths_of(paths: Paths) -> str | list[str]:
    """Return a path, or the only one of several, as text, and several as a list of texts."""
    given = [os.fspath(path) for path in _each(paths)]
    return given[0] if len(given) == 1 else given


def open_places(paths: Paths) -> Folder:
    """Return the folder at a path, or the folders at several paths as one; of one path, nothing is read.

    Raises:
        CheckpointFormatError: None of several holds a manifest, or they hold different saves.
    """
    given = list(dict.fromkeys(os.fspath(path) for path in _each(paths)))
    if len(given) == 1:
        return open_folder(given[0])
    if not given:
        raise CheckpointFormatError("no checkpoint was given: pass a path, or the places of a scattered save.")
    places = [open_folder(path) for path in given]
    for place in places:
        if not place.fs.isdir(place.root):
            raise CheckpointFormatError(f"no place of a scattered save at {place}: there is no folder. Check the path.")
    held = [frozenset(place.files()) for place in places]
    first, save_id = _first(places, held)
    for place, names in zip(places, held, strict=True):
        _check_save(place, names, places[first], save_id)
    return JoinedFolder(
        fs=places[first].fs,
        root=places[first].root,
        local=all(place.local for place in places),
        places=tuple(places),
        held=tuple(held),
    )


def _each(paths: Paths) -> Iterator[StrPath]:
    if isinstance(paths, str | os.PathLike):
        yield paths
    else:
        yield from paths


def _first(places: Sequence[Folder], held: Sequence[frozenset[str]]) -> tuple[int, str]:
    """Return which place has the manifest, and the id of its save."""
    ids: dict[int, str] = {}
    for number, place in enumerate(places):
        data = manifest_bytes(place)
        if data is not None:
            ids[number] = save_id_in(data) or ""
    if not ids:
        told = [records[0] for place, names in zip(places, held, strict=True) if (records := _any_record(place, names))]
        where = f", which rank 0 wrote on {told[0].manifest_host}, to {told[0].manifest_path}" if told else ""
        raise CheckpointFormatError(
            f"none of {' and '.join(map(str, places))} holds the manifest of a scattered save{where}.\n"
            "Give the place of rank 0 too."
        )
    # a place may hold an earlier checkpoint too, if the save was killed before it could remove it
    saves = [_saves(names, ids.get(number)) for number, names in enumerate(held)]
    everywhere = [number for number, save_id in ids.items() if all(save_id in one for one in saves)]
    distinct = {ids[number] for number in everywhere} or set(ids.values())
    if len(distinct) > 1:
        told_ids = ", and ".join(f"{places[number]} that of save {save_id}" for number, save_id in ids.items())
        raise CheckpointFormatError(
            f"the places hold different checkpoints, which can't be joined: of the manifests, {told_ids}.\n"
            "Give the places of one save."
        )
    number = next(iter(everywhere or ids))
    return number, ids[number]


def _saves(names: frozenset[str], save_id: str | None) -> set[str]:
    found = {of_file for name in names if (of_file := save_id_of(name)) is not None}
    return found | ({save_id} if save_id is not None else set())


def _check_save(place: Folder, names: frozenset[str], first: Folder, save_id: str) -> None:
    """Refuse a place that holds nothing of a save."""
    if place == first or save_id in _saves(names, None) or save_id_in(manifest_bytes(place) or b"") == save_id:
        return
    others = sorted(_saves(names, None))
    holds = f"files of save {', '.join(others[:4])}" if others else "no file of a save"
    raise CheckpointFormatError(
        f"{place} does not belong to the checkpoint whose manifest is at {first}: it holds {holds}, and the "
        f"manifest is of save {save_id}. Parts of different saves are never joined.\nGive the places of one save."
    )


def _any_record(place: Folder, names: frozenset[str]) -> list[PartRecord]:
    return [record for save_id in list(saves_in(names))[:1] for record in records_in(place, save_id, names)]
