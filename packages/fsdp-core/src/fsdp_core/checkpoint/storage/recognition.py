"""Recognizes what exists at a path: a checkpoint of this format, an interrupted save, something else, or nothing."""

from __future__ import annotations

import re

import xxhash

from fsdp_core.checkpoint.format.file_names import is_ours
from fsdp_core.checkpoint.format.json_text import MAX_JSON_BYTES
from fsdp_core.checkpoint.format.manifest import FORMAT, MANIFEST, Manifest
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.storage.part_recognition import describe_part, holds_rank_record, saves_in
from fsdp_core.checkpoint.storage.remedies import remedy, unreadable
from fsdp_core.errors import CheckpointFormatError

__all__ = [
    "fingerprint",
    "holds_manifest",
    "holds_ours",
    "is_checkpoint",
    "is_folder",
    "is_interrupted",
    "is_scattered_part",
    "is_sharded",
    "manifest_bytes",
    "read_manifest",
    "save_id_in",
]

# Formats that `fsdp checkpoint import` takes, by file names.
_OTHER_FORMATS = (
    (re.compile(r"\.distcp$"), "one of torch.distributed.checkpoint, as Lightning's own sharded strategies write"),
    (re.compile(r"rank-\d+-of-\d+\.pth$"), "the shards of torch_xla's FSDP, as Lightning's XLAFSDPStrategy writes"),
    (re.compile(r"^[^/]+\.safetensors$"), "safetensors, as save_pretrained of transformers writes"),
)


def read_manifest(path: StrPath | Folder) -> Manifest:
    """Read and check the manifest of a checkpoint; the files that it names are not accessed.

    Args:
        path: The checkpoint: a local path or an fsspec URL.

    Returns:
        The manifest.

    Raises:
        CheckpointFormatError: There is no checkpoint that this version can read.
    """
    folder = path if isinstance(path, Folder) else open_folder(path)
    try:
        path_type = folder.kind()
        if path_type == "missing" or (path_type == "link" and not folder.fs.exists(folder.root)):
            raise CheckpointFormatError(f"no checkpoint at {folder}: the path does not exist. Check the path.")
        if path_type == "file" or (path_type == "link" and not folder.fs.isdir(folder.root)):
            raise CheckpointFormatError(
                f"{folder} is a file, but a sharded checkpoint is a folder with a {MANIFEST}.\n"
                'If it is a file of torch.save, such as Lightning\'s .ckpt (also ours with state_dict_type="full"), or '
                f"of safetensors, type `fsdp checkpoint import {folder} NEW`, and pass NEW."
            )
        size = folder.size(MANIFEST)
        if size is None:
            raise CheckpointFormatError(_explain_no_manifest(folder))
        if size > MAX_JSON_BYTES:
            raise ValueError(f"it has {size} bytes, and the limit for a manifest is {MAX_JSON_BYTES}")
        return Manifest.from_json(folder.read(MANIFEST))
    except CheckpointFormatError:
        raise
    except ValueError as error:
        raise CheckpointFormatError(
            f"can't read {folder.path(MANIFEST)}: {error}.\nIt is damaged: restore it from a copy, or use an earlier "
            "checkpoint."
        ) from error
    except Exception as error:
        # Object store clients raise errors of their own, such as for missing credentials.
        if folder.local and not isinstance(error, OSError):
            raise
        reason = f"{type(error).__name__}: {error}. {remedy(error)}".rstrip()
        raise CheckpointFormatError(f"can't read {folder}: {reason}") from error


def is_folder(path: StrPath) -> bool:
    """Return whether a path or URL is a folder: a sharded checkpoint is a folder, a full checkpoint is a file."""
    folder = open_folder(path)
    return bool(folder.fs.isdir(folder.root))


def _explain_no_manifest(folder: Folder) -> str:
    file_names = folder.files()
    listed = ", ".join(file_names[:8])
    if len(file_names) > 8:
        listed += f" and {len(file_names) - 8} more"
    if not file_names:
        return f"no checkpoint at {folder}: the folder is empty. Check the path."
    part = describe_part(folder, file_names)
    if part is not None:
        return f"no complete checkpoint at {folder}: {part}"
    if all(map(is_ours, file_names)):
        return (
            f"no complete checkpoint at {folder}: a save began and was interrupted before it was committed "
            f"(there is {listed}, but no {MANIFEST}). Load an earlier checkpoint."
        )
    advice = "Check the path."
    for name_pattern, description in _OTHER_FORMATS:
        if any(name_pattern.search(name) for name in file_names if not is_ours(name)):
            advice = f"It looks like {description}: type `fsdp checkpoint import {folder} NEW`, and load NEW."
            break
    return f"{folder} is not a checkpoint of this format: it has no {MANIFEST} (there is {listed}).\n{advice}"


def is_scattered_part(path: StrPath) -> bool:
    """Return whether a path is a folder to which ranks of a scattered save have written, which holds a part of it."""
    folder = open_folder(path)
    return bool(folder.fs.isdir(folder.root)) and bool(saves_in(folder.files()))


def holds_ours(path: StrPath) -> bool:
    """Return whether a path is a folder with a file that a save has written."""
    return any(map(is_ours, open_folder(path).files()))


def is_sharded(path: StrPath) -> bool:
    """Return whether a path is a folder that saves have written: a checkpoint, a part of one, or an interrupted save.

    An empty folder, or one with files of something else, is not.
    """
    folder = open_folder(path)
    return is_checkpoint(path) or is_scattered_part(path) or (is_interrupted(folder) and bool(folder.files()))


def manifest_bytes(folder: Folder) -> bytes | None:
    """Return the manifest's raw bytes, unchecked; ``None`` if there is none."""
    try:
        return None if folder.size(MANIFEST) is None else folder.read(MANIFEST)
    except FileNotFoundError:
        return None


def save_id_in(manifest: bytes) -> str | None:
    """Return the save id in a manifest, without parsing it: it may be damaged or of another version."""
    match = re.search(rb'"save_id"\s*:\s*"([0-9a-f]{12})"', manifest[:4096])
    return None if match is None else match[1].decode()


def fingerprint(manifest: bytes | None) -> str | None:
    """Return a hash that identifies a manifest."""
    return None if manifest is None else xxhash.xxh3_128_hexdigest(manifest)


def is_interrupted(path: StrPath | Folder) -> bool:
    """Return whether a folder is empty or holds only leftovers of an interrupted save or removal.

    Args:
        path: A local path or an fsspec URL.
    """
    folder = path if isinstance(path, Folder) else open_folder(path)
    if not folder.fs.isdir(folder.root):
        return False
    names = folder.files()
    return MANIFEST not in names and all(map(is_ours, names)) and not holds_rank_record(names)


def is_checkpoint(path: StrPath) -> bool:
    """Return whether a complete checkpoint of this format exists at ``path``, in any format version.

    Args:
        path: A local path or an fsspec URL.

    Returns:
        ``True`` if there is a folder with a manifest of this format; its tensors are not checked.

    Raises:
        CheckpointFormatError: There is a manifest that this user may not read.
    """
    return holds_manifest(open_folder(path))


def holds_manifest(folder: Folder) -> bool:
    """Return whether the folder has a manifest of this format, in any format version."""
    try:
        if not folder.fs.isdir(folder.root) or not 0 < (folder.size(MANIFEST) or 0) <= MAX_JSON_BYTES:
            return False
        # A manifest begins with the format's name, so parsing all tensors is not necessary.
        beginning = folder.read(MANIFEST, 0, 256).decode(errors="replace")
        return re.match(rf'\s*{{\s*"format"\s*:\s*"{FORMAT}"', beginning) is not None
    except PermissionError as error:
        raise unreadable(folder.path(MANIFEST), error) from error
    except (OSError, CheckpointFormatError):
        return False
