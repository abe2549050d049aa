"""Where a save goes, how it takes its place there in one step, and what of others may be removed then.

Jobs may save to one path at once. No order in which they do leaves a manifest whose files are gone, for a save removes
only what can never again be named by one: its own files, unless its manifest stands; those of the manifest that it has
replaced; and those of saves whose writer is provably gone. Of two jobs the one that publishes later finds that another
has published since it began, and is told.
"""

from __future__ import annotations

import os
import posixpath
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace

from fsdp_core.checkpoint.format.manifest import MANIFEST, Manifest
from fsdp_core.checkpoint.storage.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.recognition import (
    fingerprint,
    holds_manifest,
    is_interrupted,
    is_ours,
    manifest_bytes,
    save_id_in,
    save_id_of,
)
from fsdp_core.checkpoint.storage.writers import Writer, new_writer, writer_of
from fsdp_core.errors import CheckpointExistsError

__all__ = ["Place", "choose_place"]

#: Where in object stores this process has looked for what others have left: that is a request for each checkpoint.
_looked_into: set[str] = set()
_MOST_LOOKED_AT = 100

_APART = "Give each job paths of its own, such as another dirpath= in ModelCheckpoint."


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a save goes.

    Attributes:
        path: The path that was asked for.
        writer: Who saves.
        aside: Whether to write beside the path and to move there at the end: nothing is there, so that there is no half
            checkpoint at any time, or a file or a link is in the way.
        before: The fingerprint of the manifest that was there.
        expected: The identity of the file or link that was there.
    """

    path: str
    writer: Writer
    aside: bool
    before: str | None
    expected: tuple[int, int] | None

    @property
    def save_id(self) -> str:
        """What the names of this save's files carry."""
        return self.writer.save_id

    @property
    def final(self) -> Folder:
        """The folder under the name that it has in the end."""
        return open_folder(self.path)

    @property
    def folder(self) -> Folder:
        """The folder to write to."""
        final = self.final
        if not self.aside:
            return final
        return replace(final, root=posixpath.join(os.path.dirname(final.root), self.writer.partial))

    def begin(self) -> None:
        """Tell who writes, before the first file is written."""
        if not self.aside:
            self.folder.mark(self.writer.mark)

    def publish(self, manifest: bytes, files: Collection[str]) -> bytes | None:
        """Put the manifest in place, unless somebody else has since the save began.

        Args:
            manifest: What names the files of this save, all of which are written.
            files: The files that it names.

        Returns:
            The manifest that it has replaced.

        Raises:
            CheckpointExistsError: Another job has saved there meanwhile, or does so now; its checkpoint is the one that
                is there.
        """
        folder, final = self.folder, self.final
        temporary = f".manifest-{self.save_id}.tmp"
        if self.aside:
            folder.publish(MANIFEST, manifest, temporary=temporary)
            with final.locked():
                try:
                    folder.move_to(final, aside=f"{final.root}.{self.save_id}.replaced", expected=self.expected)
                except FileExistsError as error:
                    raise _told(final) from error
            return None
        with final.locked():
            previous = manifest_bytes(final)
            if previous is not None and fingerprint(previous) != self.before:
                raise _told(final)
            there = set(final.files())
            if any(name not in there and final.size(name) is None for name in files):
                raise CheckpointExistsError(
                    f"another job has removed {final} while this one saved there, and files of this save too.\n{_APART}"
                )
            folder.publish(MANIFEST, manifest, temporary=temporary)
            # Where there is no lock, another job may have published between the two.
            if manifest_bytes(final) != manifest:
                names = final.files()
                for name in _files_of(previous, names, _marked(names)):  # which the other can't know of
                    final.remove(name)
                raise _told(final)
            return previous

    def withdraw(self, manifest: bytes | None) -> bool:
        """Whether a save that has failed may remove its files: whether no manifest names them, nor ever will.

        Args:
            manifest: What it has published, if it came to that, or has failed to.
        """
        if manifest is None:
            return True
        try:
            return manifest_bytes(self.final) != manifest
        except Exception:  # it can't be read, so it may be there
            return False

    def remove_files(self, *, of_rank: int | None = None) -> None:
        """Remove what this save has written, or what one rank has."""
        for name in self.folder.files():
            if save_id_of(name) == self.save_id and (of_rank is None or f"-rank-{of_rank:05d}." in name):
                self.folder.remove(name)

    def leave(self) -> None:
        """Remove what told who wrote, after all else, and folders that hold nothing."""
        if self.aside:
            self.folder.remove(MANIFEST)
        else:
            self.folder.remove(self.writer.mark)
        self.folder.remove_empty()

    def tidy(self, manifest: bytes, previous: bytes | None) -> None:
        """Remove what earlier saves have left: the files of the manifest that was replaced, and those of dead writers.

        Args:
            manifest: What was published.
            previous: What it has replaced.
        """
        final = self.final
        try:
            names = final.files()
            writers = {name: writer for name in names if (writer := writer_of(name)) is not None}
            standings = {name: writer.standing() for name, writer in writers.items()}
            gone = {name: writer for name, writer in writers.items() if standings[name] == "gone"}
            dead = {save_id for writer in gone.values() for save_id in (writer.save_id, writer.replaces)}
            go = _files_of(previous, names, _marked(names))
            # Read after what was looked at: a dead writer that has published since has replaced this one now.
            stands = manifest_bytes(final) == manifest
            if stands:
                go |= {name for name in names if save_id_of(name) in dead - {self.save_id}}
            for name in names:
                if name in go:
                    final.remove(name)
            for name, writer in writers.items():
                if writer.save_id == self.save_id or (stands and name in gone):
                    final.remove(name)
            final.remove_empty()
            if stands:
                living = [writer for name, writer in writers.items() if standings[name] == "lives"]
                known = {self.save_id} | {save_id for writer in living for save_id in (writer.save_id, writer.replaces)}
                _tell_of_others(final, set(names) - go, known, writers.values())
            _clean_beside(final)
        except OSError as error:
            warnings.warn(f"{final} is saved, but files of an earlier save remain in it: {error}", stacklevel=4)


def choose_place(path: StrPath, save_id: str, *, overwrite: bool) -> Place:
    """Decide where to write, before anything is written.

    Args:
        path: A local path or an fsspec URL.
        save_id: The save's id.
        overwrite: Whether a checkpoint, a file or a link there may be replaced.

    Raises:
        CheckpointExistsError: Something is at the path that must not be replaced.
    """
    final = open_folder(path)
    kind = final.kind()
    if kind != "missing" and not overwrite:
        raise CheckpointExistsError(
            f"{final} is there already, and overwrite=False: save to another path or pass overwrite=True"
        )
    if kind == "file" and not final.local:
        raise CheckpointExistsError(
            f"{final} is a file, and a checkpoint is a folder: remove it, or save to another path"
        )
    if kind == "folder" and not holds_manifest(final):
        foreign = [name for name in final.files() if not is_ours(name)]
        # asked again, for another job may have published since
        if foreign or (final.size(MANIFEST) is not None and not holds_manifest(final)):
            more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            shown = ", ".join((foreign or [MANIFEST])[:5]) + more
            raise CheckpointExistsError(
                f"{final} is a folder with something else in it ({shown}), which a save does not replace: "
                "save to another path, or move it away"
            )
    there = manifest_bytes(final) if kind == "folder" else None
    return Place(
        path=os.fspath(path),
        writer=new_writer(save_id, None if there is None else save_id_in(there)),
        aside=final.local and kind != "folder",
        before=fingerprint(there),
        expected=final.identity() if kind in ("file", "link") else None,
    )


def _told(final: Folder) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"another job has saved to {final} while this one did, and its checkpoint is the one that is there; of this "
        f"save nothing is left.\n{_APART}"
    )


def _marked(names: Collection[str]) -> set[str]:
    """The saves of which a folder tells who writes them."""
    return {writer.save_id for name in names if (writer := writer_of(name)) is not None}


def _files_of(manifest: bytes | None, names: Collection[str], marked: Collection[str]) -> set[str]:
    """What a manifest that was replaced named, of the files that bear a save's names.

    Args:
        manifest: The manifest.
        names: The files in the folder.
        marked: The saves of which it tells who writes them.
    """
    if manifest is None:
        return set()
    try:
        named = set(Manifest.from_json(manifest).files)
    except ValueError:  # it is damaged, or of another version: what nobody writes was its own
        named = {name for name in names if (save_id := save_id_of(name)) is not None and save_id not in marked}
    return {name for name in named if save_id_of(name) is not None}


def _tell_of_others(final: Folder, names: Collection[str], known: Collection[str], writers: Collection[Writer]) -> None:
    """Warn of files of which this save could not know that they are left behind.

    Args:
        final: The folder.
        names: The files that are left in it.
        known: The saves that go on, this one and others, and what those have replaced: their jobs see to the files.
        writers: Who has told of writing there.
    """
    by_id = {writer.save_id: writer for writer in writers}
    of_others = {save_id: name for name in names if (save_id := save_id_of(name)) is not None and save_id not in known}
    for save_id, name in sorted(of_others.items()):
        if final.size(name) is None:  # its own job has removed it meanwhile
            continue
        writer = by_id.get(save_id)
        whose = "which tells of no writer" if writer is None else f"by {writer}, of which nothing is known here"
        warnings.warn(
            f"{final} is saved, but files of another save are in it too ({save_id}, {whose}), and stay.\nIf no other "
            f"job saves there now, remove those with {save_id} in their names. {_APART}",
            stacklevel=5,
        )


def _clean_beside(final: Folder) -> None:
    """Remove the half folders that saves of dead writers have left in the directory that a checkpoint lies in."""
    parent = final.beside
    if parent is None:
        return
    if final.local:
        for name in os.listdir(parent.root):
            writer = writer_of(name)
            if writer is not None and name == writer.partial and writer.standing() == "gone":
                left = replace(parent, root=os.path.join(parent.root, name))
                if left.kind() == "folder":
                    _remove_ours(left)
        return
    if str(parent) not in _looked_into:
        _looked_into.add(str(parent))
        entries = [entry for entry in parent.fs.ls(parent.root, detail=True) if entry["type"] == "directory"]
        roots = {str(entry["name"]).rstrip("/") for entry in entries} - {final.root}
        alike = sorted(root for root in roots if posixpath.splitext(root)[1] == posixpath.splitext(final.root)[1])
        for root in alike[:_MOST_LOOKED_AT]:
            folder = replace(parent, root=root)
            if folder.size(MANIFEST) is None and is_interrupted(folder) and _is_left(folder):
                _remove_ours(folder)


def _is_left(folder: Folder) -> bool:
    """Whether all files in a folder are of saves whose writers are provably gone."""
    names = folder.files()
    writers = [writer for name in names if (writer := writer_of(name)) is not None]
    told = {writer.save_id for writer in writers} | {writer.replaces for writer in writers}
    return (
        bool(writers)
        and all(writer.standing() == "gone" for writer in writers)
        and all(writer_of(name) is not None or save_id_of(name) in told for name in names)
    )


def _remove_ours(folder: Folder) -> None:
    names = [name for name in folder.files() if is_ours(name)]
    for name in sorted(names, key=lambda name: writer_of(name) is not None):  # what tells of the writer goes last
        folder.remove(name)
    folder.remove_empty()
