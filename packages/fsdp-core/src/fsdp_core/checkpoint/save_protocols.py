"""Where the ranks of a save write: all to one folder, or each where it stands (a scattered save).

Both take the same steps, and all ranks take each of them. Up to the last one, no folder looks complete: only rank 0's
gets a manifest, after what the others have written is at its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from fsdp_core.checkpoint.collective import gather_to_first, run_on_all, run_on_first, total
from fsdp_core.checkpoint.format.file_names import part_file, rank_in
from fsdp_core.checkpoint.format.manifest import MANIFEST, FileEntry
from fsdp_core.checkpoint.format.part_record import PartRecord
from fsdp_core.checkpoint.format.places import PlaceOfRanks, group_places
from fsdp_core.checkpoint.storage.commit import SaveTarget
from fsdp_core.checkpoint.storage.local_target import LocalTarget
from fsdp_core.checkpoint.storage.writers import writing
from fsdp_core.runtime import Runtime

__all__ = ["PerHostSave", "SharedSave"]


class SharedSave:
    """All ranks write to one folder, which rank 0 looks after.

    Args:
        target: The folder, as rank 0 has chosen it.
        rank: This rank.

    Attributes:
        is_apart: Whether any rank writes elsewhere than rank 0.
    """

    is_apart = False

    def __init__(self, target: SaveTarget, rank: int) -> None:
        self.target, self.rank = target, rank

    def running(self) -> AbstractContextManager[None]:
        """A context in which this process counts as a writer."""
        return writing(self.target.writer) if self.rank == 0 else nullcontext()

    def begin(self, runtime: Runtime, action: str) -> None:
        """Mark what is written to, before anything else, so that leftover files can be attributed to this save."""
        run_on_all(runtime, action, lambda: self.target.begin() if self.rank == 0 else None)

    def record(self, runtime: Runtime, files: Mapping[str, FileEntry]) -> None:
        """Write what makes this rank's folder recognised, after its other files."""

    def files_of_first(self, files: Mapping[str, FileEntry]) -> Mapping[str, FileEntry]:
        """Those of the files that were written to rank 0's folder; on rank 0."""
        return files

    def places(self) -> tuple[PlaceOfRanks, ...]:
        """The manifest's entries of where ranks have written; on rank 0."""
        return ()

    def publish(self) -> None:
        """Move what was written to the path, everywhere but with rank 0, before rank 0 commits the manifest."""

    def tidy(self) -> None:
        """Remove what the path held before; not rank 0's, which has a manifest to go by."""

    def discard(self, runtime: Runtime, manifest: bytes | None) -> None:
        """Remove what a failed save has written, unless its last step has committed it nevertheless."""
        undone = run_on_first(
            runtime, "reading the manifest", lambda: self.rank == 0 and self.target.withdraw(manifest)
        )
        if undone:
            run_on_all(runtime, "removing a failed save", self._remove_files)
            with suppress(OSError):  # the failure itself is raised, not errors of the cleanup
                self._leave()

    def _remove_files(self) -> None:
        self.target.remove_files(of_rank=None if self.rank == 0 else self.rank)

    def _leave(self) -> None:
        if self.rank == 0:
            self.target.leave()


class _Address(NamedTuple):
    """Where a rank writes, for rank 0."""

    host: str
    path: str
    with_first: bool


class PerHostSave(SharedSave):
    """Each rank writes to a path of its own, and ranks that see one folder share it.

    Args:
        local_target: Where this rank writes.
        rank: This rank.
        first_path: The path of rank 0's target, as rank 0 names it.
    """

    def __init__(self, local_target: LocalTarget, rank: int, first_path: str) -> None:
        super().__init__(local_target.target, rank)
        self.local_target, self._first_path = local_target, first_path
        self._leads = self._with_first = False
        self._addresses: list[_Address] = []

    def running(self) -> AbstractContextManager[None]:
        return writing(self.target.writer)

    def begin(self, runtime: Runtime, action: str) -> None:
        """Find out who writes where."""
        local_target = self.local_target

        def claim_first() -> None:
            if self.rank == 0:
                self._with_first = self._leads = True
                local_target.claim_first()

        def claim() -> None:
            if self.rank:
                self._with_first = local_target.is_with_first()
                self._leads = not self._with_first and local_target.claim()

        run_on_all(runtime, action, claim_first)
        run_on_all(runtime, action, claim)
        address = _Address(local_target.host, local_target.path, self._with_first)
        self._addresses = gather_to_first(runtime, action, lambda: address) or []
        self.is_apart = total(runtime, [not self._with_first])[0] > 0

    def record(self, runtime: Runtime, files: Mapping[str, FileEntry]) -> None:
        if self._with_first:
            return
        record = PartRecord(
            save_id=self.target.save_id,
            rank=self.rank,
            world_size=runtime.world_size,
            host=self.local_target.host,
            path=self.local_target.path,
            manifest_host=self.local_target.first.host,
            manifest_path=self._first_path,
            files=files,
        )
        with self.target.folder.writing(part_file(self.target.save_id, self.rank)) as stream:
            stream.write(record.to_json().encode())

    def files_of_first(self, files: Mapping[str, FileEntry]) -> Mapping[str, FileEntry]:
        files_of_first: dict[str, FileEntry] = {}
        for name, entry in files.items():
            pattern_and_rank = rank_in(name)  # None for what rank 0 alone writes
            if pattern_and_rank is None or self._addresses[pattern_and_rank[1]].with_first:
                files_of_first[name] = entry
        return files_of_first

    def places(self) -> tuple[PlaceOfRanks, ...]:
        return group_places((address.host, address.path) for address in self._addresses) if self.is_apart else ()

    def publish(self) -> None:
        if self._leads and self.rank:
            self.local_target.publish()

    def tidy(self) -> None:
        if self._leads and self.rank:
            self.local_target.tidy()

    def _remove_files(self) -> None:
        if self.rank:
            self.local_target.remove_files(self.rank)
            return
        self.target.remove_files()
        if self.target.aside:
            self.target.folder.remove(MANIFEST)

    def _leave(self) -> None:
        if self._leads:
            self.local_target.leave()
