"""The folders that the ranks of a scattered save write to, and which rank leads in each: it publishes and cleans up.

Paths don't say which ranks share a folder, since hosts may share a disk or not. So each rank tries to claim its folder
by creating a file, or the folder itself, under a name that all ranks derive alike. The file system lets one of them
succeed, and that rank leads. A killed save leaves its claims behind, beside the mark of the leader, by which the
leader's host can tell whether the process still runs.

A folder other than rank 0's never gets a manifest. What it held before, a part of an earlier save or a checkpoint, is
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
from fsdp_core.checkpoint.storage.commit import (
    SaveTarget,
    another_was_saved,
    choose_target,
    files_named,
    remove_dead_partials,
)
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath
from fsdp_core.checkpoint.storage.recognition import fingerprint, manifest_bytes
from fsdp_core.checkpoint.storage.writers import Writer, writer_of, writers_by_name

__all__ = ["LocalTarget", "choose_local_target", "first_local_target"]


@dataclass(frozen=True, kw_only=True)
class LocalTarget:
    """Where one rank of a scattered save writes.

    Attributes:
        target: The folder. The target's ``writer`` is the name by which ranks claim it, and no process.
        own_writer: This process as the writer.
        first_writer: Rank 0's process as the writer.
    """

    target: SaveTarget
    own_writer: Writer
    first_writer: Writer

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.own_writer.host

    @property
    def path(self) -> str:
        """The final path, as people write it on this host: an absolute path, or a URL."""
        final = self.target.final
        return os.path.abspath(final.root) if final.local else str(final)

    def claim_for_first(self) -> None:
        """Claim the folder for rank 0, and mark it as rank 0's, before other ranks claim theirs."""
        self.claim()
        self.target.folder.mark(self._mark_of_first)

    def claim(self) -> bool:
        """Claim the folder, and return whether this rank leads there. Ranks in rank 0's folder do not call it."""
        target, folder = self.target, self.target.folder
        if not folder.local:  # an object store does not say which rank was the first, so each leads
            folder.mark(self.own_writer.mark)
            return True
        try:
            if target.is_written_beside:
                os.makedirs(os.path.dirname(folder.root) or ".", exist_ok=True)
                os.mkdir(folder.root)
            else:
                folder.mark(target.writer.mark)
        except FileExistsError:
            return False
        folder.mark(self.own_writer.mark)
        return True

    def shares_with_first(self) -> bool:
        """Whether this is rank 0's folder, which rank 0 has marked already."""
        return self.target.folder.size(self._mark_of_first) is not None

    def publish(self) -> None:
        """Move the folder with the files of all its ranks to its final path. Not for rank 0's folder.

        Raises:
            CheckpointExistsError: Another job has saved there in the meantime.
        """
        target, final = self.target, self.target.final
        if not target.is_written_beside:
            if fingerprint(manifest_bytes(final)) != target.fingerprint_before:
                raise another_was_saved(final)
            final.sync()
            return
        target.folder.sync()
        with final.locked():
            try:
                target.folder.move_to(final, aside=self._path_aside, expected=target.replaced_identity, keep=True)
            except FileExistsError as error:
                raise another_was_saved(final) from error

    def remove_files(self, rank: int) -> None:
        """Remove what one rank has written in a save that has failed."""
        for folder in self._folders_with_files():
            for name in folder.files():
                if save_id_of(name) == self.target.save_id and f"-rank-{rank:05d}." in name:
                    folder.remove(name)

    def remove_marks(self) -> None:
        """Remove the marks of a save that has failed, after its files, and put back what was at the path."""
        for folder in self._folders_with_files():
            self._remove_claims(folder)
            folder.remove_empty()
        if self.target.replaced_identity is not None and os.path.lexists(self._path_aside):
            with suppress(OSError):  # a new owner of the path keeps it
                if not os.path.lexists(self.target.final.root):
                    os.rename(self._path_aside, self.target.final.root)

    def remove_earlier_save(self) -> None:
        """Remove the folder's earlier save and the marks. In rank 0's folder, SaveTarget.remove_leftovers does it."""
        final = self.target.final
        try:
            file_names = final.files()
            writers = writers_by_name(file_names).values()
            dead_saves = {writer.save_id for writer in writers if writer.standing() == "gone"}
            running_saves = {writer.save_id for writer in writers} - dead_saves
            replaced_saves = set(self.target.earlier_saves) - running_saves
            killed_saves = dead_saves - {self.target.save_id}
            removable_saves = replaced_saves | killed_saves
            previous = manifest_bytes(final)
            removable_files = {name for name in file_names if save_id_of(name) in removable_saves}
            if previous is not None and fingerprint(previous) == self.target.fingerprint_before:
                final.remove(MANIFEST)
                removable_files |= files_named(previous, file_names)
            for name in sorted(removable_files):
                final.remove(name)
            for name in file_names:
                writer = writer_of(name)
                if writer is not None and writer.save_id in removable_saves:
                    final.remove(name)
            self._remove_claims(final)
            final.remove_empty()
            if self.target.replaced_identity is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._path_aside)
            remove_dead_partials(final)
        except OSError as error:
            warnings.warn(f"{final} is saved, but files of an earlier save remain in it: {error}", stacklevel=4)

    @property
    def _mark_of_first(self) -> str:
        """The name of the mark in rank 0's folder. It has rank 0 in it, since ranks may be threads of one process."""
        return _writer_for(self.first_writer, "rank 0").mark

    @property
    def _path_aside(self) -> str:
        return f"{self.target.final.root}.{self.target.save_id}.replaced"

    def _folders_with_files(self) -> list[Folder]:
        """The folders that may hold files of this save: where they were written, and where they were moved."""
        folders = [self.target.folder, self.target.final] if self.target.is_written_beside else [self.target.final]
        return [folder for folder in folders if folder.kind() == "folder"]

    def _remove_claims(self, folder: Folder) -> None:
        for name in folder.files():
            writer = writer_of(name)
            if writer is not None and writer.save_id == self.target.save_id:
                folder.remove(name)


def first_local_target(target: SaveTarget) -> LocalTarget:
    """Return rank 0's local target, at the target that was chosen for the save."""
    return LocalTarget(target=_with_claim(target, target.writer), own_writer=target.writer, first_writer=target.writer)


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
    claimed_target = _with_claim(target, first.first_writer)
    return LocalTarget(target=claimed_target, own_writer=target.writer, first_writer=first.first_writer)


def _with_claim(target: SaveTarget, first_writer: Writer) -> SaveTarget:
    """Give a target the writer that names its claim, by the path's last step: the same for all ranks in a folder."""
    return replace(target, writer=_writer_for(first_writer, f"claim of {os.path.basename(target.final.root)}"))


def _writer_for(writer: Writer, purpose: str) -> Writer:
    """Return a writer whose mark differs from that of the process, so that it can serve another purpose."""
    return replace(writer, replaces=xxhash.xxh3_64_hexdigest(purpose.encode("utf-8", "surrogateescape"))[:12])
