"""Several folders as one, for readers of a scattered save, whose ranks have each written to a folder of their host.

Such a folder is called a place, as in the manifest. Each file is read in the place where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_core.checkpoint.format.file_names import save_id_of
from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.part_recognition import records_in, saves_in
from fsdp_core.checkpoint.storage.recognition import manifest_bytes, save_id_in
from fsdp_core.errors import CheckpointFormatError

__all__ = ["JoinedFolder", "Paths", "normalize_paths", "open_places", "shown_paths"]

Paths = StrPath | Sequence[StrPath]
"""A checkpoint's path; or several, the places of a scattered save."""


@dataclass(frozen=True, kw_only=True)
class JoinedFolder(Folder):
    """Several folders as one. A file that several hold is read from one of them.

    Attributes:
        places: The folders. ``root`` and ``fs`` are those of the one with the manifest.
        file_names: The names of the files of each.
        chosen_places: By file name, the number of the place to read the file from, if not from the first that has it.
    """

    places: tuple[Folder, ...]
    file_names: tuple[frozenset[str], ...] = field(repr=False)
    chosen_places: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return " and ".join(map(str, self.places))

    def places_with(self, name: str) -> list[int]:
        """Return the numbers of the places that have a file of this name."""
        return [number for number, file_names_of_place in enumerate(self.file_names) if name in file_names_of_place]

    def place_to_read(self, name: str) -> Folder:
        """Return the place to read a file from; the first if none has the file."""
        if name == MANIFEST:
            return Folder(fs=self.fs, root=self.root, local=self._manifest_is_local)
        if name in self.chosen_places:
            return self.places[self.chosen_places[name]]
        numbers = self.places_with(name)
        return self.places[numbers[0] if numbers else 0]

    @property
    def _manifest_is_local(self) -> bool:
        places_with_manifest = [place for place in self.places if place.fs == self.fs and place.root == self.root]
        return places_with_manifest[0].local

    def path(self, name: str) -> str:
        return self.place_to_read(name).path(name)

    def files(self) -> list[str]:
        return sorted(set().union(*self.file_names))

    def size(self, name: str) -> int | None:
        return self.place_to_read(name).size(name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.place_to_read(name).read(name, start, end)


def shown_paths(paths: Paths) -> str:
    """Return paths as text for messages."""
    return " and ".join(os.fspath(path) for path in _iterate_paths(paths))


def normalize_paths(paths: Paths) -> str | list[str]:
    """Return a path, or the only one of several, as text, and several as a list of texts."""
    path_texts = [os.fspath(path) for path in _iterate_paths(paths)]
    return path_texts[0] if len(path_texts) == 1 else path_texts


def open_places(paths: Paths) -> Folder:
    """Return the folder at a path, or the folders at several paths as one; of one path, nothing is read.

    Raises:
        CheckpointFormatError: None of several holds a manifest, or they hold different saves.
    """
    path_texts = list(dict.fromkeys(os.fspath(path) for path in _iterate_paths(paths)))
    if len(path_texts) == 1:
        return open_folder(path_texts[0])
    if not path_texts:
        raise CheckpointFormatError("no checkpoint was given: pass a path, or the places of a scattered save.")
    folders = [open_folder(path) for path in path_texts]
    for folder in folders:
        if not folder.fs.isdir(folder.root):
            raise CheckpointFormatError(
                f"no place of a scattered save at {folder}: there is no folder. Check the path."
            )
    file_names = [frozenset(folder.files()) for folder in folders]
    manifest_number, save_id = _find_manifest(folders, file_names)
    manifest_folder = folders[manifest_number]
    for folder, names in zip(folders, file_names, strict=True):
        _check_belongs(folder, names, manifest_folder, save_id)
    return JoinedFolder(
        fs=manifest_folder.fs,
        root=manifest_folder.root,
        local=all(folder.local for folder in folders),
        places=tuple(folders),
        file_names=tuple(file_names),
    )


def _iterate_paths(paths: Paths) -> Iterator[StrPath]:
    if isinstance(paths, str | os.PathLike):
        yield paths
    else:
        yield from paths


def _find_manifest(folders: Sequence[Folder], file_names: Sequence[frozenset[str]]) -> tuple[int, str]:
    """Return the number of the place that has the manifest, and the id of its save."""
    manifest_ids: dict[int, str] = {}  # by the number of the place, the id in its manifest; "" if that is damaged
    for place_number, folder in enumerate(folders):
        data = manifest_bytes(folder)
        if data is not None:
            manifest_ids[place_number] = save_id_in(data) or ""
    if not manifest_ids:
        hint = ""
        for folder, names in zip(folders, file_names, strict=True):
            save_ids = list(saves_in(names))
            records = records_in(folder, save_ids[0], names) if save_ids else []
            if records:
                hint = f", which rank 0 wrote on {records[0].manifest_host}, to {records[0].manifest_path}"
                break
        raise CheckpointFormatError(
            f"none of {' and '.join(map(str, folders))} holds the manifest of a scattered save{hint}.\n"
            "Give the place of rank 0 too."
        )
    # A place may also hold the manifest of an earlier checkpoint, if the save was killed before it could remove that.
    # So the save is one of which every place holds something.
    shared_ids = set(manifest_ids.values())
    for place_number, names in enumerate(file_names):
        ids_of_place = _save_ids(names)
        if place_number in manifest_ids:
            ids_of_place.add(manifest_ids[place_number])
        shared_ids &= ids_of_place
    candidate_ids = shared_ids or set(manifest_ids.values())
    if len(candidate_ids) > 1:
        manifests = ", and ".join(
            f"{folders[place_number]} that of save {save_id}" for place_number, save_id in manifest_ids.items()
        )
        raise CheckpointFormatError(
            f"the places hold different checkpoints, which can't be joined: of the manifests, {manifests}.\n"
            "Give the places of one save."
        )
    (save_id,) = candidate_ids
    first_number = next(number for number, manifest_id in manifest_ids.items() if manifest_id == save_id)
    return first_number, save_id


def _save_ids(names: frozenset[str]) -> set[str]:
    """Return the ids of the saves that files belong to by their names."""
    save_ids = {save_id_of(name) for name in names}
    return {save_id for save_id in save_ids if save_id is not None}


def _check_belongs(folder: Folder, names: frozenset[str], manifest_folder: Folder, save_id: str) -> None:
    """Refuse a place that holds nothing of a save."""
    if folder == manifest_folder or save_id in _save_ids(names):
        return
    if save_id_in(manifest_bytes(folder) or b"") == save_id:
        return
    other_saves = sorted(_save_ids(names))
    content = f"files of save {', '.join(other_saves[:4])}" if other_saves else "no file of a save"
    raise CheckpointFormatError(
        f"{folder} does not belong to the checkpoint whose manifest is at {manifest_folder}: it holds {content}, and "
        f"the manifest is of save {save_id}. Parts of different saves are never joined.\nGive the places of one save."
    )
