"""A save in several places: ranks that see different folders write where they stand, and rank 0 the manifest.

The steps beyond those of a save in one place, each of which all ranks take. Up to the last one, no place looks
complete: only rank 0's gets a manifest, after what the others have written is at its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from fsdp_core.checkpoint.collective import together_each, together_first, together_to_first, total
from fsdp_core.checkpoint.format.chunks import rank_in
from fsdp_core.checkpoint.format.manifest import MANIFEST, FileEntry
from fsdp_core.checkpoint.format.part_record import PartRecord, record_name
from fsdp_core.checkpoint.format.places import PlaceOfRanks, grouped
from fsdp_core.checkpoint.storage.part_places import Stand
from fsdp_core.runtime import Runtime

__all__ = ["Scattering"]


class _Told(NamedTuple):
    """What a rank tells rank 0 of where it stands."""

    host: str
    path: str
    with_first: bool


class Scattering:
    """Where the ranks of one save stand.

    Args:
        stand: Where this rank does.
        first_path: The place of rank 0, as rank 0 names it.

    Attributes:
        is_apart: Whether any rank stands elsewhere than rank 0. Otherwise this is a save like any other.
    """

    def __init__(self, stand: Stand, first_path: str) -> None:
        self.stand, self._first_path = stand, first_path
        self.is_apart = False
        self._leads = self._with_first = False
        self._told: list[_Told] | None = None

    def begin(self, runtime: Runtime, doing: str) -> None:
        """Find out who stands where, before anything else is written. All ranks call this."""
        stand = self.stand

        def claim_first() -> None:
            if runtime.rank == 0:
                self._with_first = self._leads = True
                stand.claim_first()

        def claim() -> None:
            if runtime.rank:
                self._with_first = stand.is_with_first()
                self._leads = not self._with_first and stand.claim()

        together_each(runtime, doing, claim_first)
        together_each(runtime, doing, claim)
        self._told = together_to_first(runtime, doing, lambda: _Told(stand.host, stand.path, self._with_first))
        self.is_apart = total(runtime, [not self._with_first])[0] > 0

    def files_here(self, files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """Those of the files that were written to rank 0's place; on rank 0."""
        told = self._told or []
        ranks = {name: found[1] for name in files if (found := rank_in(name)) is not None}
        return {name: entry for name, entry in files.items() if name not in ranks or told[ranks[name]].with_first}

    def places(self) -> tuple[PlaceOfRanks, ...]:
        """The manifest's entries; on rank 0."""
        return grouped((told.host, told.path) for told in self._told or ()) if self.is_apart else ()

    def record(self, runtime: Runtime, files: Mapping[str, FileEntry]) -> None:
        """Write what makes this rank's place recognised, after its other files."""
        if self._with_first:
            return
        save_id, stand = self.stand.place.save_id, self.stand
        record = PartRecord(
            save_id=save_id,
            rank=runtime.rank,
            world_size=runtime.world_size,
            host=stand.host,
            path=stand.path,
            manifest_host=stand.first.host,
            manifest_path=self._first_path,
            files=files,
        )
        with stand.place.folder.writing(record_name(save_id, runtime.rank)) as stream:
            stream.write(record.to_json().encode())

    def publish(self, runtime: Runtime, doing: str) -> None:
        """Move what was written to the path, everywhere but with rank 0. All ranks call this."""
        if self.is_apart:
            together_each(runtime, doing, lambda: self.stand.publish() if self._leads and runtime.rank else None)

    def discard(self, runtime: Runtime, manifest: bytes | None) -> None:
        """Remove what a failed save has written, unless its last step has committed it nevertheless. All ranks."""
        stand, is_first = self.stand, runtime.rank == 0

        def remove() -> None:
            if is_first:
                stand.place.remove_files()
                if stand.place.aside:
                    stand.place.folder.remove(MANIFEST)
            else:
                stand.remove_files(runtime.rank)

        undone = together_first(runtime, "reading the manifest", lambda: is_first and stand.place.withdraw(manifest))
        if undone:
            together_each(runtime, "removing a failed save", remove)
            if self._leads:
                with suppress(OSError):  # the failure itself is raised, not errors of the cleanup
                    stand.leave()

    def tidy(self) -> None:
        """Remove what the place held before; not rank 0's, which has a manifest to go by."""
        if self._leads and not self._with_first:
            self.stand.tidy()
