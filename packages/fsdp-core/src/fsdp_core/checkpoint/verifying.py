"""Verifies every byte of a checkpoint against its manifest, in one process or divided between the ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from fsdp_core.checkpoint.format.chunks import StoredChunk
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest, StoredTensor
from fsdp_core.checkpoint.format.patterns import PatternedChunks
from fsdp_core.checkpoint.storage.joined_folder import Paths, open_places
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.checkpoint.storage.part_recognition import describe_rest
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.remedies import unreadable
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.errors import CheckpointFormatError

__all__ = ["OnBytes", "files_in_other_places", "find_damage", "refuse_damage", "share_of", "verify"]

OnBytes = Callable[[str, int], None]
"""Called with a file's name and the number of bytes that have just been read."""

_BLOCK_BYTES = 2**18  # stays in the processor's cache between reading and hashing
_REMOTE_BLOCK_BYTES = 8 * 2**20
_THREADS = 4
_MOST_SHOWN = 20
_MISSING = "is missing"


@retries_if_replaced("path")
def verify(path: Paths, *, on_bytes: OnBytes | None = None) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    The manifest has a checksum of its own, and reading it checks that its chunks cover every tensor. Files are read by
    up to four threads, which use at most 32 MiB of memory together.

    Args:
        path: A local path or an fsspec URL; or several, the places of a scattered save.
        on_bytes: Called with a file's name and the number of bytes that have just been read, to show progress; never by
            two threads at once.

    Raises:
        CheckpointFormatError: The manifest can't be read, or files are missing or changed; up to 20 are named.
    """
    folder = open_places(path)
    files = StoredFiles(folder, read_manifest(folder))
    refuse_damage(files, find_damage(files, files.manifest.files, on_bytes=on_bytes))


def share_of(files: Mapping[str, FileEntry], rank: int, world_size: int) -> list[str]:
    """Return the files that this rank examines when the ranks divide them into shares of about the same size.

    Files are ordered by the rank that wrote them, so a rank that loads with the saved layout examines mostly the files
    that it is going to read.

    Example:
        >>> entry = FileEntry(size=8, checksum="xxh3:" + "0" * 16)
        >>> files = {name: entry for name in ("model/a-rank-0", "model/a-rank-1", "optimizer/a-rank-0")}
        >>> share_of(files, 0, 2), share_of(files, 1, 2)
        (['model/a-rank-0'], ['optimizer/a-rank-0', 'model/a-rank-1'])
    """
    total = max(sum(entry.size for entry in files.values()), 1)
    share = []
    start = 0
    for name in sorted(files, key=lambda name: (name.rpartition("/")[2], name)):
        size = files[name].size
        # A file belongs to the rank in whose share of all bytes its middle lies. Doubled, so that it is an integer.
        twice_middle = 2 * start + size
        if min(twice_middle * world_size // (2 * total), world_size - 1) == rank:
            share.append(name)
        start += size
    return share


def find_damage(
    files: StoredFiles, file_names: Iterable[str], *, checksums: bool = True, on_bytes: OnBytes | None = None
) -> dict[str, str]:
    """Compare files with their entries in the manifest.

    Args:
        files: The files of a checkpoint.
        file_names: The files to examine.
        checksums: Whether to read every byte. Otherwise, only the plain data and its tensors are read, and the sizes
            and headers of the other files are compared.
        on_bytes: As in :func:`verify`.

    Returns:
        The fault of each damaged file, by name.

    Raises:
        CheckpointFormatError: A link leads out of the folder, or this user may not read a file.
    """
    file_names = list(file_names)
    lock = threading.Lock()
    expected_chunks = _ExpectedChunks(files, file_names)
    plain_files = {files.manifest.state_file, files.manifest.state_tensors}

    def report_bytes(name: str, number: int) -> None:
        if on_bytes is not None:
            with lock:
                on_bytes(name, number)

    def compare_size(name: str) -> str | None:
        try:
            return _compare_size(files.folder, name, files.manifest.files[name])
        except PermissionError as error:
            raise unreadable(files.folder.path(name), error) from error

    def compare_content(name: str) -> str | None:
        try:
            fault = None
            if checksums or name in plain_files:
                fault = _compare_checksum(files.folder, name, files.manifest.files[name], report_bytes)
            if fault is None and (expected_chunks.has_chunks_in(name) or name == files.manifest.state_tensors):
                fault = _compare_header(files, name, expected_chunks.chunks_in(name))
            return fault
        except Exception as error:  # object store clients raise errors of their own
            for cause in (error, error.__cause__):
                if isinstance(cause, PermissionError):  # which says nothing about the file's content
                    raise unreadable(files.folder.path(name), cause) from error
            return f"can't be read: {type(error).__name__}: {error}"

    with ThreadPoolExecutor(max(1, min(_THREADS, len(file_names), os.cpu_count() or 1))) as pool:
        faults = dict(zip(file_names, pool.map(compare_size, file_names), strict=True))
        names_of_right_size = [name for name in file_names if faults[name] is None]
        faults.update(zip(names_of_right_size, pool.map(compare_content, names_of_right_size), strict=True))
    return {name: fault for name, fault in faults.items() if fault is not None}


def refuse_damage(files: StoredFiles, faults: Mapping[str, str]) -> None:
    """Raise an error if :func:`find_damage` has found faults.

    Args:
        files: The files of the checkpoint.
        faults: The faults by name.

    Raises:
        CheckpointFormatError: There are faults. The message shows at most 20. Of a scattered checkpoint whose other
            places were not given, it says where they are.
    """
    if not faults:
        return
    missing_elsewhere = files_in_other_places(files.manifest, faults)
    if len(missing_elsewhere) == len(faults):
        raise CheckpointFormatError(describe_rest(files.folder, files.manifest, missing_elsewhere))
    lines = [f"the checkpoint {files.folder} is damaged:"]
    lines += [f"  {name} {fault}" for name, fault in list(faults.items())[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"  … and {len(faults) - _MOST_SHOWN} more")
    lines.append("Restore these files, or load an earlier checkpoint.")
    if missing_elsewhere:
        lines.append(describe_rest(files.folder, files.manifest, missing_elsewhere))
    raise CheckpointFormatError("\n".join(lines))


def files_in_other_places(manifest: Manifest, faults: Mapping[str, str]) -> list[str]:
    """Return the missing files of a scattered checkpoint, which may be in places that were not given.

    Args:
        manifest: The manifest.
        faults: The faults that :func:`find_damage` has found.
    """
    if not manifest.places:
        return []
    return [name for name, fault in faults.items() if fault == _MISSING]


#: A tensor's key, the tensor, and the chunk of it that a file must hold.
_ExpectedChunk = tuple[str, StoredTensor, StoredChunk]


class _ExpectedChunks:
    """The chunks that some files must hold. Only these are kept, since a rank examines a share of very many files."""

    def __init__(self, files: StoredFiles, names: Sequence[str]) -> None:
        self._listed: dict[str, list[_ExpectedChunk]] = {name: [] for name in names}
        self._patterned: list[tuple[str, StoredTensor, PatternedChunks]] = []
        for key, tensor in files.manifest.tensors.items():
            if isinstance(tensor.chunks, PatternedChunks):
                self._patterned.append((key, tensor, tensor.chunks))
                continue
            for chunk in tensor.chunks:
                if chunk.file in self._listed:
                    self._listed[chunk.file].append((key, tensor, chunk))

    def chunks_in(self, name: str) -> Iterator[_ExpectedChunk]:
        """Yield the chunks of a file."""
        yield from self._listed[name]
        for key, tensor, chunks in self._patterned:
            for chunk in chunks.in_file(name):
                yield key, tensor, chunk

    def has_chunks_in(self, name: str) -> bool:
        """Whether a file must hold any chunk."""
        return next(self.chunks_in(name), None) is not None


def _compare_size(folder: Folder, name: str, entry: FileEntry) -> str | None:
    size = folder.size(name)
    if size is None:
        return _MISSING
    return None if size == entry.size else f"has {size} bytes instead of {entry.size}"


def _compare_checksum(folder: Folder, name: str, entry: FileEntry, report_bytes: OnBytes) -> str | None:
    digest = xxhash.xxh3_64()
    if folder.local:
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(entry.size, 1))))
        with open(folder.path(name), "rb", buffering=0) as stream:
            while number := stream.readinto(buffer):
                digest.update(buffer[:number])
                report_bytes(name, number)
    else:
        for start in range(0, entry.size, _REMOTE_BLOCK_BYTES):
            block = folder.read(name, start, min(start + _REMOTE_BLOCK_BYTES, entry.size))
            digest.update(block)
            report_bytes(name, len(block))
    checksum = f"xxh3:{digest.hexdigest()}"
    return None if checksum == entry.checksum else f"has the checksum {checksum} instead of {entry.checksum}"


def _compare_header(files: StoredFiles, name: str, expected_chunks: Iterable[_ExpectedChunk]) -> str | None:
    try:
        header = files.header(name)
    except CheckpointFormatError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        return f"can't be read: {error}"
    for key, tensor, chunk in expected_chunks:
        entry = header.get(chunk.key)
        if entry is None or entry.shape != chunk.lengths or entry.dtype_name != tensor.dtype_name:
            content = "nothing by that name" if entry is None else f"{entry.shape} {entry.dtype_name}"
            return (
                f"should hold a chunk of {key!r} as {chunk.key!r}, of shape {chunk.lengths} and "
                f"{tensor.dtype_name}, but it holds {content}"
            )
    return None
