"""Where a save is written, how it is committed atomically, and which files of other saves it may then remove.

Several jobs may save to one path at once. No interleaving leaves a manifest whose files are gone, because a save
removes only files that no manifest can name again: its own, unless its manifest is in place; those of the manifest that
it has replaced; and those of saves whose writer is provably gone. If two jobs save at once, the one that commits
later detects that the other has committed since it began, and raises an error.
"""

from __future__ import annotations

import os
import posixpath
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from fsdp_core.checkpoint.format.file_names import is_ours, save_id_of, temporary_manifest
from fsdp_core.checkpoint.format.manifest import MANIFEST, Manifest
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.part_recognition import saves_in
from fsdp_core.checkpoint.storage.recognition import (
    fingerprint,
    holds_manifest,
    is_interrupted,
    manifest_bytes,
    save_id_in,
)
from fsdp_core.checkpoint.storage.writers import Writer, new_writer, writer_of, writers_by_name, writers_in
from fsdp_core.errors import CheckpointExistsError

__all__ = ["SaveTarget", "another_was_saved", "choose_target", "files_named", "remove_dead_partials"]

#: Object store folders that this process has already searched for leftovers, which takes a request per checkpoint.
_searched_folders: set[str] = set()
_MAX_SEARCHED = 100

_SEPARATE_PATHS = "Give each job paths of its own, such as another dirpath= in ModelCheckpoint."


@dataclass(frozen=True, kw_only=True)
class SaveTarget:
    """Where a save is written.

    Attributes:
        path: The requested path.
        writer: The writer of the save.
        is_written_beside: Whether to write to a folder next to the path, which is moved there at the end. That is done
            if nothing is at the path, so that it never holds a partial checkpoint, or if a file or a link is to be
            replaced.
        fingerprint_before: The fingerprint of the manifest that was at the path when the save began.
        replaced_identity: The identity of the file or link that was at the path, and is to be replaced.
        earlier_saves: The ids of saves of which there were files at the path.
    """

    path: str
    writer: Writer
    is_written_beside: bool
    fingerprint_before: str | None
    replaced_identity: tuple[int, int] | None
    earlier_saves: frozenset[str] = frozenset()

    @property
    def save_id(self) -> str:
        """The id in the names of this save's files."""
        return self.writer.save_id

    @property
    def final(self) -> Folder:
        """The folder at the requested path."""
        return open_folder(self.path)

    @property
    def folder(self) -> Folder:
        """The folder to write to."""
        final = self.final
        if not self.is_written_beside:
            return final
        return replace(final, root=posixpath.join(os.path.dirname(final.root), self.writer.partial))

    def begin(self) -> None:
        """Record the writer, before the first file is written."""
        if not self.is_written_beside:
            self.folder.mark(self.writer.mark)

    def commit(self, manifest: bytes, files: Collection[str]) -> bytes | None:
        """Commit the manifest, unless another job has committed since the save began.

        Args:
            manifest: The manifest of this save, whose files are all written.
            files: The names of these files.

        Returns:
            The manifest that it has replaced.

        Raises:
            CheckpointExistsError: Another job has saved there in the meantime, or is doing so; its checkpoint is in
                place.
        """
        folder, final = self.folder, self.final
        temporary = temporary_manifest(self.save_id)
        if self.is_written_beside:
            folder.commit(MANIFEST, manifest, temporary=temporary)
            with final.locked():
                try:
                    aside = f"{final.root}.{self.save_id}.replaced"
                    folder.move_to(final, aside=aside, expected=self.replaced_identity)
                except FileExistsError as error:
                    raise another_was_saved(final) from error
            return None
        with final.locked():
            previous = manifest_bytes(final)
            if previous is not None and fingerprint(previous) != self.fingerprint_before:
                raise another_was_saved(final)
            present_files = set(final.files())
            # looked up again, since a listing of an object store may be outdated
            if any(name not in present_files and final.size(name) is None for name in files):
                raise CheckpointExistsError(
                    f"another job has removed {final} and files of this save while this one saved there.\n"
                    f"{_SEPARATE_PATHS}"
                )
            folder.commit(MANIFEST, manifest, temporary=temporary)
            # Without a lock, another job may have committed in between.
            if manifest_bytes(final) != manifest:
                names = final.files()
                # The other job does not know the manifest that this one has just replaced, so its files are removed
                # here.
                for name in _files_named_by(previous, names, _saves_with_mark(names)):
                    final.remove(name)
                raise another_was_saved(final)
            return previous

    def may_remove_files(self, manifest: bytes | None) -> bool:
        """Return whether a failed save may remove its files, because no manifest names them or ever will.

        Args:
            manifest: The manifest that the save has committed or failed to commit; ``None`` if it did not get that far.
        """
        if manifest is None:
            return True
        try:
            return manifest_bytes(self.final) != manifest
        except Exception:  # a manifest that can't be read may be the save's own
            return False

    def remove_files(self, *, of_rank: int | None = None) -> None:
        """Remove the files of this save, or those of one rank."""
        for name in self.folder.files():
            if save_id_of(name) == self.save_id and (of_rank is None or f"-rank-{of_rank:05d}." in name):
                self.folder.remove(name)

    def remove_marks(self) -> None:
        """Remove the writer's mark, after all other files, and empty folders."""
        if self.is_written_beside:
            self.folder.remove(MANIFEST)
        else:
            self.folder.remove(self.writer.mark)
        self.folder.remove_empty()

    def remove_leftovers(self, manifest: bytes, previous: bytes | None) -> None:
        """Remove the leftovers of earlier saves: files of the manifest that was replaced, and of dead writers.

        Args:
            manifest: The manifest that was committed.
            previous: The manifest that it has replaced.
        """
        final = self.final
        try:
            names = final.files()
            writers = writers_by_name(names)
            standings = {name: writer.standing() for name, writer in writers.items()}
            dead_saves = _saves_and_replaced(writer for name, writer in writers.items() if standings[name] == "gone")
            files_to_remove = _files_named_by(previous, names, _saves_with_mark(names))
            # Read after the listing. If a writer committed and then died, this manifest is no longer the current one.
            is_current = manifest_bytes(final) == manifest
            if is_current:
                running_saves = {writer.save_id for writer in writers.values()} - dead_saves
                replaced_saves = self.earlier_saves - running_saves
                saves_to_remove = (dead_saves | replaced_saves) - {self.save_id}
                files_to_remove |= {name for name in names if save_id_of(name) in saves_to_remove}
            for name in names:
                if name in files_to_remove:
                    final.remove(name)
            for name, writer in writers.items():
                if writer.save_id == self.save_id or (is_current and writer.save_id in dead_saves):
                    final.remove(name)
            final.remove_empty()
            if is_current:
                living_saves = _saves_and_replaced(
                    writer for name, writer in writers.items() if standings[name] == "lives"
                )
                remaining_files = set(names) - files_to_remove
                _warn_about_other_saves(final, remaining_files, living_saves | {self.save_id}, writers.values())
            remove_dead_partials(final)
        except OSError as error:
            warnings.warn(f"{final} is saved, but files of an earlier save remain in it: {error}", stacklevel=4)


def choose_target(path: StrPath, save_id: str, *, overwrite: bool) -> SaveTarget:
    """Decide where to write, before anything is written.

    Args:
        path: A local path or an fsspec URL.
        save_id: The save's id.
        overwrite: Whether a checkpoint, a file or a link there may be replaced.

    Raises:
        CheckpointExistsError: The path holds something that must not be replaced.
    """
    final = open_folder(path)
    final_type = final.kind()
    if final_type != "missing" and not overwrite:
        raise CheckpointExistsError(
            f"{final} already exists, and overwrite=False: save to another path or pass overwrite=True"
        )
    if final_type == "file" and not final.local:
        raise CheckpointExistsError(
            f"{final} is a file, and a checkpoint is a folder: remove it, or save to another path"
        )
    if final_type == "folder" and not holds_manifest(final):
        foreign = [name for name in final.files() if not is_ours(name)]
        # Looked up again, because another job may have committed in the meantime.
        if foreign or (final.size(MANIFEST) is not None and not holds_manifest(final)):
            more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            foreign_names = ", ".join((foreign or [MANIFEST])[:5]) + more
            raise CheckpointExistsError(
                f"{final} is a folder with something else in it ({foreign_names}), which a save does not replace: "
                "save to another path, or move it away"
            )
    manifest_at_path = manifest_bytes(final) if final_type == "folder" else None
    return SaveTarget(
        path=os.fspath(path),
        writer=new_writer(save_id, None if manifest_at_path is None else save_id_in(manifest_at_path)),
        is_written_beside=final.local and final_type != "folder",
        fingerprint_before=fingerprint(manifest_at_path),
        replaced_identity=final.identity() if final_type in ("file", "link") else None,
        earlier_saves=frozenset(saves_in(final.files())) if final_type == "folder" else frozenset(),
    )


def another_was_saved(final: Folder) -> CheckpointExistsError:
    """Return the error for a path at which another job has committed since a save began."""
    return CheckpointExistsError(
        f"another job has saved to {final} while this one did: the other job's checkpoint is in place, and nothing of "
        f"this save is left.\n{_SEPARATE_PATHS}"
    )


def _saves_with_mark(names: Collection[str]) -> set[str]:
    """Return the ids of the saves whose writers have a mark in the folder."""
    return {writer.save_id for writer in writers_by_name(names).values()}


def _saves_and_replaced(writers: Iterable[Writer]) -> set[str]:
    """Return the ids of the saves that writers write, and of those that these replace."""
    save_ids: set[str] = set()
    for writer in writers:
        save_ids |= {writer.save_id, writer.replaces}
    return save_ids


def _files_named_by(manifest: bytes | None, names: Collection[str], marked: Collection[str]) -> set[str]:
    """Return the files of a replaced manifest, limited to names that a save gives.

    Args:
        manifest: The manifest.
        names: The files in the folder.
        marked: The ids of the saves whose writers have a mark.
    """
    if manifest is None:
        return set()
    try:
        named_files = set(Manifest.from_json(manifest).files)
    except ValueError:  # damaged, or of another version: files of saves without a mark were those of this manifest
        named_files = {name for name in names if save_id_of(name) not in marked}
    return {name for name in named_files if save_id_of(name) is not None}


def _warn_about_other_saves(
    final: Folder, names: Collection[str], recognized_saves: Collection[str], writers: Collection[Writer]
) -> None:
    """Warn of files that may be leftovers of other saves.

    Args:
        final: The folder.
        names: The remaining files in it.
        recognized_saves: This save, other running saves and the ones those have replaced: their jobs remove the files.
        writers: The writers with a mark in the folder.
    """
    writer_of_save = {writer.save_id: writer for writer in writers}
    file_of_save: dict[str, str] = {}  # of each save that is not recognized, one of its files
    for name in names:
        save_id = save_id_of(name)
        if save_id is not None and save_id not in recognized_saves:
            file_of_save[save_id] = name
    for save_id, name in sorted(file_of_save.items()):
        if final.size(name) is None:  # its own job has removed it in the meantime
            continue
        writer = writer_of_save.get(save_id)
        writer_text = "its writer is not recorded" if writer is None else f"by {writer}, of which nothing is known here"
        warnings.warn(
            f"{final} is saved, but it also holds files of another save ({save_id}, {writer_text}), which are kept.\n"
            f"If no other job saves there now, remove those with {save_id} in their names. {_SEPARATE_PATHS}",
            stacklevel=5,
        )


def files_named(manifest: bytes, names: Collection[str]) -> set[str]:
    """Return the files of a manifest that is to be removed, limited to names that a save gives.

    Args:
        manifest: The manifest.
        names: The files in the folder.
    """
    return _files_named_by(manifest, names, _saves_with_mark(names))


def remove_dead_partials(final: Folder) -> None:
    """Remove the partial folders that saves of dead writers have left in the checkpoint's parent directory."""
    parent = final.parent
    if parent is None:
        return
    if final.local:
        for name in os.listdir(parent.root):
            writer = writer_of(name)
            if writer is not None and name == writer.partial:
                partial = replace(parent, root=os.path.join(parent.root, name))
                if partial.kind() == "folder":
                    writers = writers_in(partial.files(), writer)
                    if all(writer.standing() == "gone" for writer in writers):
                        _remove_ours(partial)
        return
    if str(parent) not in _searched_folders:
        _searched_folders.add(str(parent))
        entries = [entry for entry in parent.fs.ls(parent.root, detail=True) if entry["type"] == "directory"]
        roots = {str(entry["name"]).rstrip("/") for entry in entries} - {final.root}
        similar_roots = sorted(
            root for root in roots if posixpath.splitext(root)[1] == posixpath.splitext(final.root)[1]
        )
        for root in similar_roots[:_MAX_SEARCHED]:
            folder = replace(parent, root=root)
            if folder.size(MANIFEST) is None and is_interrupted(folder) and _is_leftover(folder):
                _remove_ours(folder)


def _is_leftover(folder: Folder) -> bool:
    """Return whether all files in a folder are of saves whose writers are provably gone."""
    names = folder.files()
    writers = writers_by_name(names)
    if not writers or any(writer.standing() != "gone" for writer in writers.values()):
        return False
    recorded_saves = _saves_and_replaced(writers.values())
    return all(name in writers or save_id_of(name) in recorded_saves for name in names)


def _remove_ours(folder: Folder) -> None:
    names = [name for name in folder.files() if is_ours(name)]
    for name in sorted(names, key=lambda name: writer_of(name) is not None):  # the writer's mark is removed last
        folder.remove(name)
    folder.remove_empty()
