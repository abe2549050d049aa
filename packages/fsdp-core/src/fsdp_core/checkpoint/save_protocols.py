"""Where the ranks of a save write: all to one folder, or each to a path on its own host (a scattered save).

Both take the same steps, and all ranks take each of them. Before the last step, no folder looks like a complete
checkpoint: only rank 0's gets a manifest, when the files of all other ranks are at their final paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from fsdp_core.checkpoint.collective import gather_to_first, run_on_all, run_on_first, total
from fsdp_core.checkpoint.format.file_names import part_file, split_off_rank
from fsdp_core.checkpoint.format.manifest import MANIFEST, FileEntry
from fsdp_core.checkpoint.format.part_record import PartRecord
from fsdp_core.checkpoint.format.places import PlaceOfRanks, group_places
from fsdp_core.checkpoint.storage.commit import SaveTarget
from fsdp_core.checkpoint.storage.local_target import LocalTarget
from fsdp_core.checkpoint.storage.writers import writing
from fsdp_core.runtime import Runtime

__all__ = ["PerHostSave", "SharedSave"]


class SharedSave:
    """All ranks write to one folder, which rank 0 marks, commits and cleans up.

    Args:
        target: The folder, as rank 0 has chosen it.
        rank: This rank.

    Attributes:
        is_scattered: Whether any rank writes to another folder than rank 0.
    """

    is_scattered = False

    def __init__(self, target: SaveTarget, rank: int) -> None:
        self.target, self.rank = target, rank

    def counting_as_writer(self) -> AbstractContextManager[None]:
        """A context in which this process counts as a writer."""
        return writing(self.target.writer) if self.rank == 0 else nullcontext()

    def begin(self, runtime: Runtime, action: str) -> None:
        """Mark the folder before anything else, so that leftover files can be attributed to this save."""
        run_on_all(runtime, action, lambda: self.target.begin() if self.rank == 0 else None)

    def write_part_record(self, runtime: Runtime, files: Mapping[str, FileEntry]) -> None:
        """Write the record of this rank's files, by which a folder without a manifest is recognised."""

    def files_of_first(self, files: Mapping[str, FileEntry]) -> Mapping[str, FileEntry]:
        """Select the files that were written to rank 0's folder; on rank 0."""
        return files

    def places(self) -> tuple[PlaceOfRanks, ...]:
        """The manifest's entries of where ranks have written; on rank 0."""
        return ()

    def publish(self) -> None:
        """Move files to their final path, on the ranks with another folder than rank 0, before rank 0 commits."""

    def remove_earlier_save(self) -> None:
        """Remove an earlier save from another folder than rank 0's, where the commit itself removes it."""

    def discard(self, runtime: Runtime, manifest: bytes | None) -> None:
        """Remove the files of a failed save, unless rank 0 has committed the manifest before the failure."""
        is_withdrawn = run_on_first(
            runtime, "reading the manifest", lambda: self.rank == 0 and self.target.may_remove_files(manifest)
        )
        if is_withdrawn:
            run_on_all(runtime, "removing a failed save", self._remove_files)
            with suppress(OSError):  # the failure itself is raised, not errors of the cleanup
                self._remove_marks()

    def _remove_files(self) -> None:
        self.target.remove_files(of_rank=None if self.rank == 0 else self.rank)

    def _remove_marks(self) -> None:
        if self.rank == 0:
            self.target.remove_marks()


class _Address(NamedTuple):
    """Where a rank writes, as it reports it to rank 0."""

    host: str
    path: str
    shares_with_first: bool


class PerHostSave(SharedSave):
    """Each rank writes to a path of its own. Of the ranks that see the same folder, one leads, and cleans it up.

    Args:
        local_target: Where this rank writes.
        rank: This rank.
        first_path: The path of rank 0's target, as rank 0 names it.
    """

    def __init__(self, local_target: LocalTarget, rank: int, first_path: str) -> None:
        super().__init__(local_target.target, rank)
        self.local_target, self._first_path = local_target, first_path
        self._leads_folder = self._shares_with_first = False
        self._addresses: list[_Address] = []

    def counting_as_writer(self) -> AbstractContextManager[None]:
        return writing(self.target.writer)

    def begin(self, runtime: Runtime, action: str) -> None:
        """Find out which ranks share a folder, and which of them leads there."""
        run_on_all(runtime, action, self._claim_for_first)
        run_on_all(runtime, action, self._claim)
        address = _Address(self.local_target.host, self.local_target.path, self._shares_with_first)
        self._addresses = gather_to_first(runtime, action, lambda: address) or []
        (ranks_elsewhere,) = total(runtime, [not self._shares_with_first])
        self.is_scattered = ranks_elsewhere > 0

    def _claim_for_first(self) -> None:
        """Make rank 0 the leader of its folder, before other ranks look for its claim."""
        if self.rank == 0:
            self._shares_with_first = self._leads_folder = True
            self.local_target.claim_for_first()

    def _claim(self) -> None:
        """Find out whether this rank sees rank 0's folder, and whether it leads another one."""
        if self.rank:
            self._shares_with_first = self.local_target.shares_with_first()
            self._leads_folder = not self._shares_with_first and self.local_target.claim()

    def write_part_record(self, runtime: Runtime, files: Mapping[str, FileEntry]) -> None:
        if self._shares_with_first:
            return
        record = PartRecord(
            save_id=self.target.save_id,
            rank=self.rank,
            world_size=runtime.world_size,
            host=self.local_target.host,
            path=self.local_target.path,
            manifest_host=self.local_target.first_writer.host,
            manifest_path=self._first_path,
            files=files,
        )
        with self.target.folder.writing(part_file(self.target.save_id, self.rank)) as stream:
            stream.write(record.to_json().encode())

    def files_of_first(self, files: Mapping[str, FileEntry]) -> Mapping[str, FileEntry]:
        files_of_first: dict[str, FileEntry] = {}
        for name, entry in files.items():
            pattern_and_rank = split_off_rank(name)  # None for what rank 0 alone writes
            if pattern_and_rank is None or self._addresses[pattern_and_rank[1]].shares_with_first:
                files_of_first[name] = entry
        return files_of_first

    def places(self) -> tuple[PlaceOfRanks, ...]:
        return group_places((address.host, address.path) for address in self._addresses) if self.is_scattered else ()

    def publish(self) -> None:
        if self._leads_folder and self.rank:
            self.local_target.publish()

    def remove_earlier_save(self) -> None:
        if self._leads_folder and self.rank:
            self.local_target.remove_earlier_save()

    def _remove_files(self) -> None:
        if self.rank:
            self.local_target.remove_files(self.rank)
            return
        self.target.remove_files()
        if self.target.is_written_beside:
            self.target.folder.remove(MANIFEST)

    def _remove_marks(self) -> None:
        if self._leads_folder:
            self.local_target.remove_marks()
