"""Rewrites a checkpoint with another number of files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from fsdp_core.checkpoint.format.chunks import StoredChunk, chunk_name
from fsdp_core.checkpoint.format.file_names import (
    Section,
    file_name,
    is_ours,
    name_in_save,
    split_off_rank,
    state_file,
    state_tensors_file,
)
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest, StoredTensor
from fsdp_core.checkpoint.storage.atomic import OVERWRITE, check_apart, named_errors
from fsdp_core.checkpoint.storage.commit import choose_target
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.plain_json import read_plain
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.tensor_bytes import BytesSource, TensorBytes, open_files, write_sources
from fsdp_core.checkpoint.storage.writers import writing
from fsdp_core.checkpoint.tools.conversion import OnProgress, counter, refuse_damaged
from fsdp_core.checkpoint.tools.describing import PartFinder
from fsdp_core.errors import CheckpointExistsError, CheckpointValueError

__all__ = ["check_target", "reshard"]

_MOST_SHOWN = 5
_ALLOWED_FILES = 1024  # allowed even if some files hold no tensor
_MAX_FILES = 100_000  # the limit of the five digits in their names


@retries_if_replaced("path")
def reshard(
    path: StrPath,
    out: StrPath,
    *,
    files: int,
    overwrite: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Write a checkpoint again, in ``files`` files for each of its sections.

    Every tensor is split into one run of rows per file, equal up to one row. A tensor with fewer rows is put into fewer
    files, those that hold the least. Nothing else changes: the plain data is copied byte by byte, and the manifest
    keeps the strategy, the versions and the world size that saved. At most a few MiB are in memory at once, and torch
    is not imported. Any world size loads any number of files; this is for readers that need a certain number.

    Args:
        path: The checkpoint: a local path or an fsspec URL.
        out: The folder to write: a local path or an fsspec URL.
        files: The number of files for the model, and for the optimizers.
        overwrite: Whether to replace a checkpoint at ``out``, once the new one is complete.
        verify: Whether to verify the checksums of all files first.
        on_progress: Called with the progress.

    Returns:
        The new manifest.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        CheckpointExistsError: ``out`` holds something that must not be replaced; nothing was written.
        CheckpointValueError: ``files`` is less than 1, or far more than the checkpoint has rows.
        CheckpointError: The checkpoint can't be written; the previous content of ``out`` is unchanged.
    """
    if files < 1:
        raise CheckpointValueError(f"a checkpoint can't be written in {files} files: pass 1 or more")
    source = open_files(path)
    check_apart(out, source.folder)
    target = open_folder(out)
    check_target(target, overwrite=overwrite)
    manifest_before = source.manifest
    rows = max((tensor.shape[0] for tensor in manifest_before.tensors.values() if tensor.shape), default=1)
    max_files = min(max(rows, _ALLOWED_FILES), _MAX_FILES)
    if files > max_files:
        raise CheckpointValueError(
            f"{source.folder} can't be written in {files} files: no tensor in it has more than {rows} rows to divide "
            f"between them. Pass {max_files} or less."
        )
    tensor_bytes = sum(tensor.nbytes for tensor in manifest_before.tensors.values())
    file_bytes = sum(entry.size for entry in manifest_before.files.values()) if verify else 0
    on_bytes = counter(tensor_bytes + file_bytes, on_progress)
    refuse_damaged(source, manifest_before.files, checksums=verify, on_bytes=on_bytes)
    read_plain(source)  # raises if the plain data, which is copied as it is, does not have the form of a save
    save_target = choose_target(out, secrets.token_hex(6), overwrite=True)
    data: bytes | None = None
    with named_errors(f"write {target}"), writing(save_target.writer):
        try:
            save_target.begin()
            manifest = _write(TensorBytes(source), save_target.folder, save_target.save_id, files, on_bytes)
            data = manifest.to_json().encode()
            previous = save_target.commit(data, manifest.files)
        except BaseException:
            with suppress(OSError):
                if save_target.may_remove_files(data):
                    save_target.remove_files()
                    save_target.remove_marks()
            raise
        save_target.remove_leftovers(data, previous)
    return manifest


def check_target(target: Folder, *, overwrite: bool) -> None:
    """Refuse a path where a checkpoint must not be written.

    Args:
        target: The folder at the path.
        overwrite: Whether a checkpoint there may be replaced.

    Raises:
        CheckpointExistsError: It must not.
    """
    target_type = target.kind()
    if target_type == "missing":
        return
    if target_type != "folder":
        raise CheckpointExistsError(f"{target} is a {target_type}, and the output is a folder: choose another path")
    file_names = target.files()
    foreign_files = [name for name in file_names if not is_ours(name)]
    if foreign_files:
        listed = ", ".join(foreign_files[:_MOST_SHOWN])
        if len(foreign_files) > _MOST_SHOWN:
            listed += f" and {len(foreign_files) - _MOST_SHOWN} more"
        raise CheckpointExistsError(
            f"{target} is a folder with something else in it ({listed}), which is not replaced: choose another path, "
            "or move that away"
        )
    if file_names and not overwrite:
        raise CheckpointExistsError(f"{target} already exists: {OVERWRITE}")


def _write(reader: TensorBytes, target: Folder, save_id: str, count: int, on_bytes: Callable[[int], None]) -> Manifest:
    source_manifest = reader.manifest
    layout = _lay_out(source_manifest, save_id, count)
    names = [
        file_name(section, save_id, number)
        for section in sorted({*_sections(source_manifest).values()})
        for number in range(count)
    ]
    sources: dict[str, dict[str, BytesSource]] = {name: {} for name in names}
    for key, tensor in layout.items():
        for chunk in tensor.chunks:
            rows = (chunk.offsets[0], chunk.offsets[0] + chunk.lengths[0]) if tensor.shape else None
            sources[chunk.file][chunk.key] = reader.source(key, rows)
    files: dict[str, FileEntry] = {}
    for name, content in sources.items():
        with target.writing(name) as stream:
            size, digest = write_sources(stream, content, on_bytes=on_bytes)
        files[name] = FileEntry(size=size, checksum=f"xxh3:{digest}")
    # Files that are not of a rank are copied as they are, under names with the new save's id.
    new_names = {name: name_in_save(name, save_id) for name in source_manifest.files if split_off_rank(name) is None}
    new_names[source_manifest.state_file] = state_file(save_id)
    if source_manifest.state_tensors is not None:
        new_names[source_manifest.state_tensors] = state_tensors_file(save_id)
    for name, new_name in new_names.items():
        with target.writing(new_name) as stream:
            for block in reader.blocks_of_file(name):
                stream.write(block)
        files[new_name] = source_manifest.files[name]
    return replace(
        source_manifest,
        save_id=save_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tensors=layout,
        files=files,
        state_file=state_file(save_id),
        state_tensors=None if source_manifest.state_tensors is None else state_tensors_file(save_id),
        places=(),
    )


def _sections(manifest: Manifest) -> dict[str, Section]:
    """The section of each tensor."""
    finder = PartFinder(manifest.kinds)
    kinds = manifest.kinds
    sections: dict[str, Section] = {}
    for key in manifest.tensors:
        path = finder.part_of(key)
        if path is None:
            sections[key] = "state"
        else:
            sections[key] = "model" if kinds[path] == "model" else "optimizer"
    return sections


def _lay_out(manifest: Manifest, save_id: str, count: int) -> dict[str, StoredTensor]:
    """Assign the rows of each tensor to files."""
    sections = _sections(manifest)
    section_sizes = {section: [0] * count for section in sections.values()}
    chunks: dict[str, list[StoredChunk]] = {}
    # Tensors that fill all files equally come first, so that the others balance the rest.
    for key in sorted(manifest.tensors, key=lambda key: -_piece_count(manifest.tensors[key].shape, count)):
        tensor = manifest.tensors[key]
        section = sections[key]
        pieces = _piece_count(tensor.shape, count)
        sizes = section_sizes[section]
        order = range(count) if pieces == count else sorted(range(count), key=lambda number: (sizes[number], number))
        chunks[key] = []
        for piece, number in zip(range(pieces), order, strict=False):
            offsets, lengths = _box_of_piece(tensor.shape, piece, pieces)
            chunks[key].append(
                StoredChunk(
                    file=file_name(section, save_id, number),
                    key=chunk_name(key, tensor.shape, (offsets, lengths)),
                    offsets=offsets,
                    lengths=lengths,
                )
            )
            sizes[number] += tensor.nbytes // max(pieces, 1)
    return {key: replace(tensor, chunks=tuple(chunks[key])) for key, tensor in manifest.tensors.items()}


def _piece_count(shape: Sequence[int], count: int) -> int:
    if 0 in shape:
        return 0
    return min(count, shape[0]) if shape else 1


def _box_of_piece(shape: tuple[int, ...], piece: int, pieces: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not shape:
        return (), ()
    begin = piece * shape[0] // pieces
    end = (piece + 1) * shape[0] // pieces
    return (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
