"""The places of a scattered save: where a rank writes that may not see rank 0's folder, and who looks after it.

Ranks that stand in one folder share a place. Which of them do can't be told from paths: hosts may share a disk or not.
So the ranks of a place claim it, by creating one name that all of them know; a file system lets one of them do so,
which then leads. The claims of a save are its leftovers too, if it is killed: beside them lies the mark of the leader,
whose host can tell whether it still runs.

A place other than rank 0's never gets a manifest. What was there before, a part of an earlier save or a checkpoint, is
removed after rank 0 has committed the manifest.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

import xxhash

from fsdp_core.checkpoint.format.file_names import save_id_of
from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.storage.commit import SaveTarget, another_was_saved, choose_target, clean_beside, files_named
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath
from fsdp_core.checkpoint.storage.recognition import fingerprint, manifest_bytes
from fsdp_core.checkpoint.storage.writers import Writer, writer_of, writers_by_name

__all__ = ["LocalTarget", "choose_local_target", "first_local_target"]


@dataclass(frozen=True, kw_only=True)
class LocalTarget:
    """Where one rank of a scattered save writes.

    Attributes:
        target: Its place. Its writer is the name by which ranks claim the place, not a process.
        own: This process as the writer.
        first: The writer that rank 0 is.
    """

    target: SaveTarget
    own: Writer
    first: Writer

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.own.host

    @property
    def path(self) -> str:
        """The place for people on this host: an absolute path, or a URL."""
        final = self.target.final
        return os.path.abspath(final.root) if final.local else str(final)

    def claim_first(self) -> None:
        """Claim the place for rank 0, before others claim theirs."""
        self.claim()
        self.target.folder.mark(self._mark_of_first)

    def claim(self) -> bool:
        """Claim the place, and return whether this rank leads there. Ranks that stand with rank 0 need not."""
        target, folder = self.target, self.target.folder
        if not folder.local:  # no rank can tell that it was the first, so each leads
            folder.mark(self.own.mark)
            return True
        try:
            if target.aside:
                os.makedirs(os.path.dirname(folder.root) or ".", exist_ok=True)
                os.mkdir(folder.root)
            else:
                folder.mark(target.writer.mark)
        except FileExistsError:
            return False
        folder.mark(self.own.mark)
        return True

    def is_with_first(self) -> bool:
        """Whether rank 0, which has claimed its place already, stands in this one."""
        return self.target.folder.size(self._mark_of_first) is not None

    def publish(self) -> None:
        """Move what all ranks of a place have written to its path. Not for rank 0's place.

        Raises:
            CheckpointExistsError: Another job has saved there in the meantime.
        """
        target, final = self.target, self.target.final
        if not target.aside:
            if fingerprint(manifest_bytes(final)) != target.before:
                raise another_was_saved(final)
            final.sync()
            return
        target.folder.sync()
        with final.locked():
            try:
                target.folder.move_to(final, aside=self._path_aside, expected=target.expected, keep=True)
            except FileExistsError as error:
                raise another_was_saved(final) from error

    def remove_files(self, rank: int) -> None:
        """Remove what one rank has written in a save that has failed."""
        for folder in self._folders():
            for name in folder.files():
                if save_id_of(name) == self.target.save_id and f"-rank-{rank:05d}." in name:
                    folder.remove(name)

    def leave(self) -> None:
        """Remove the leader's marks after all files of a save that has failed, and put back what was at the path."""
        for folder in self._folders():
            self._unmark(folder)
            folder.remove_empty()
        if self.target.expected is not None and os.path.lexists(self._path_aside):
            with suppress(OSError):  # a new owner of the path keeps it
                if not os.path.lexists(self.target.final.root):
                    os.rename(self._path_aside, self.target.final.root)

    def tidy(self) -> None:
        """Remove what the place held before, and the marks. Not for rank 0's place, which has a manifest to go by."""
        final = self.target.final
        try:
            file_names = final.files()
            writers = writers_by_name(file_names).values()
            dead_saves = {writer.save_id for writer in writers if writer.standing() == "gone"}
            running_saves = {writer.save_id for writer in writers} - dead_saves
            replaced_saves = set(self.target.earlier) - running_saves
            killed_saves = dead_saves - {self.target.save_id}
            removable_saves = replaced_saves | killed_saves
            previous = manifest_bytes(final)
            removable_files = {name for name in file_names if save_id_of(name) in removable_saves}
            if previous is not None and fingerprint(previous) == self.target.before:
                final.remove(MANIFEST)
                removable_files |= files_named(previous, file_names)
            for name in sorted(removable_files):
                final.remove(name)
            for name in file_names:
                writer = writer_of(name)
                if writer is not None and writer.save_id in removable_saves:
                    final.remove(name)
            self._unmark(final)
            final.remove_empty()
            if self.target.expected is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._path_aside)
            clean_beside(final)
        except OSError as error:
            warnings.warn(f"{final} is saved, but files of an earlier save remain in it: {error}", stacklevel=4)

    @property
    def _mark_of_first(self) -> str:
        """A mark in rank 0's place alone, whoever leads elsewhere: ranks may be threads of one process."""
        return _rename_writer(self.first, "rank 0").mark

    @property
    def _path_aside(self) -> str:
        return f"{self.target.final.root}.{self.target.save_id}.replaced"

    def _folders(self) -> list[Folder]:
        """Where the files of this save are: where they were written to, or where they were moved."""
        folders = [self.target.folder, self.target.final] if self.target.aside else [self.target.final]
        return [folder for folder in folders if folder.kind() == "folder"]

    def _unmark(self, folder: Folder) -> None:
        for name in folder.files():
            writer = writer_of(name)
            if writer is not None and writer.save_id == self.target.save_id:
                folder.remove(name)


def first_local_target(target: SaveTarget) -> LocalTarget:
    """Return rank 0's local target at a place that was chosen for a save."""
    return LocalTarget(target=_with_claim(target, target.writer), own=target.writer, first=target.writer)


def choose_local_target(path: StrPath, first: LocalTarget, *, overwrite: bool) -> LocalTarget:
    """Decide where a rank other than rank 0 writes, before any rank writes.

    Args:
        path: Its path.
        first: Rank 0's local target.
        overwrite: Whether a checkpoint, a part of one, a file or a link there may be replaced.

    Raises:
        CheckpointExistsError: The path holds something that must not be replaced.
    """
    target = choose_target(path, first.target.save_id, overwrite=overwrite)
    return LocalTarget(target=_with_claim(target, first.first), own=target.writer, first=first.first)


def _with_claim(target: SaveTarget, first: Writer) -> SaveTarget:
    """Name the place as all ranks do that stand in it: paths in one folder differ in their last step."""
    return replace(target, writer=_rename_writer(first, f"claim of {os.path.basename(target.final.root)}"))


def _rename_writer(writer: Writer, what: str) -> Writer:
    """A name with a writer's save and process, for something else than a mark of that process."""
    return replace(writer, replaces=xxhash.xxh3_64_hexdigest(what.encode("utf-8", "surrogateescape"))[:12])
