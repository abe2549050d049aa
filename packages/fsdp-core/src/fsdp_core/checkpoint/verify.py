"""Verifying: every byte of a checkpoint against the checksums of its manifest."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from fsdp_core.checkpoint.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.manifest import FileEntry
from fsdp_core.checkpoint.recognition import read_manifest
from fsdp_core.errors import CheckpointFormatError

__all__ = ["verify"]

_BLOCK_BYTES = 16 * 2**20


def verify(path: StrPath, *, on_bytes: Callable[[str, int], None] | None = None) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    The manifest itself carries a checksum, and that its chunks cover every tensor is checked when it is read. At most
    16 MiB are in memory at once.

    Args:
        path: A local path or an fsspec URL.
        on_bytes: Called with a file's name and a number of bytes whenever these have been read, to show progress.

    Raises:
        CheckpointFormatError: The manifest can't be read, or files are missing or changed; all of them are named.
    """
    folder = open_folder(path)
    faults = []
    for name, entry in read_manifest(folder).files.items():
        fault = _compare(folder, name, entry, on_bytes)
        if fault is not None:
            faults.append(f"  {name} {fault}")
    if faults:
        raise CheckpointFormatError(
            "\n".join(
                [f"the checkpoint {folder} is damaged:", *faults, "Restore these files, or load an earlier checkpoint."]
            )
        )


def _compare(folder: Folder, name: str, entry: FileEntry, on_bytes: Callable[[str, int], None] | None) -> str | None:
    size = folder.size(name)
    if size is None:
        return "is missing"
    if size != entry.size:
        return f"has {size} bytes instead of {entry.size}"
    digest = xxhash.xxh3_64()
    for start in range(0, size, _BLOCK_BYTES):
        block = folder.read(name, start, min(start + _BLOCK_BYTES, size))
        digest.update(block)
        if on_bytes is not None:
            on_bytes(name, len(block))
    checksum = f"xxh3:{digest.hexdigest()}"
    return None if checksum == entry.checksum else f"has the checksum {checksum} instead of {entry.checksum}"
