"""Recognizes which library's checkpoint is at a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_core.checkpoint.format.manifest import MANIFEST
from fsdp_core.checkpoint.importing import dcp, xla
from fsdp_core.checkpoint.importing.files import SourceFile, open_file, source_of
from fsdp_core.checkpoint.importing.safetensors_source import INDEX_SUFFIX, SUFFIX
from fsdp_core.checkpoint.importing.torch_file import TorchFile, is_torch_file
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath
from fsdp_core.checkpoint.storage.recognition import holds_manifest
from fsdp_core.errors import CheckpointFormatError

__all__ = ["LIGHTNING_META", "Format", "Source", "recognise"]

Format = Literal["dcp", "dcp-parts", "safetensors", "safetensors-file", "torch-file", "xla"]

LIGHTNING_META = "meta.pt"

_SHARD_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin")
_KNOWN = (
    "What can be imported: folders of torch.distributed.checkpoint (of Lightning's FSDPStrategy and "
    "ModelParallelStrategy, torchtitan, accelerate), files of torch.save (.ckpt, .pt), safetensors files and "
    "folders, and the shards of torch_xla's FSDP with their shard_metadata."
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of an import.

    Attributes:
        format: Its format.
        folder: The folder of its files.
        file: The file, if the source is a single file.
        parts: The subfolders of torch.distributed.checkpoint, each with a trailing slash.
        archives: The ranks' files.
    """

    format: Format
    folder: Folder
    file: SourceFile | None = None
    parts: tuple[str, ...] = ()
    archives: tuple[TorchFile, ...] = ()


def recognise(path: StrPath) -> Source:
    """Recognize the source at a path.

    Raises:
        CheckpointFormatError: It can't be imported; the message lists what is there.
    """
    folder, name = source_of(path)
    if name is not None:
        return _recognise_file(open_file(folder, name))
    if holds_manifest(folder):
        raise CheckpointFormatError(
            f"{folder} is a checkpoint of this format already (it has a {MANIFEST}): use it as it is."
        )
    names = folder.files()
    if dcp.METADATA in names:
        return Source(format="dcp", folder=folder)
    if any(name.endswith(".distcp") and "/" not in name for name in names):
        raise CheckpointFormatError(
            f"{folder} has files of torch.distributed.checkpoint, but no {dcp.METADATA}, which is written last: the "
            "save was interrupted. Import an earlier checkpoint."
        )
    parts = [name.removesuffix(dcp.METADATA) for name in names if name.endswith(f"/{dcp.METADATA}")]
    if parts:
        return _recognise_accelerate(folder, parts)
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) and "/" not in name for name in names):
        return Source(format="safetensors", folder=folder)
    files = [open_file(folder, name) for name in names if "/" not in name and name.endswith(_SHARD_SUFFIXES)]
    archives = [TorchFile(file) for file in files if is_torch_file(file)]
    shards = tuple(archive for archive in archives if _is_shard(archive))
    if shards:
        return Source(format="xla", folder=folder, archives=shards)
    listed_names = ", ".join(names[:8]) or "nothing"
    if len(names) > 8:
        listed_names += f" and {len(names) - 8} more"
    files_of_torch = [str(archive.file) for archive in archives]
    hint = f"For one of its files, type its path: {', '.join(files_of_torch[:3])}.\n" if files_of_torch else ""
    raise CheckpointFormatError(
        f"{folder} holds nothing that can be imported (there is {listed_names}).\n{hint}{_KNOWN}"
    )


def _recognise_file(file: SourceFile) -> Source:
    if file.name == dcp.METADATA or file.name.endswith((".distcp", INDEX_SUFFIX)):
        raise CheckpointFormatError(f"{file} is one file of a checkpoint: import its folder, {file.folder}.")
    if is_torch_file(file):
        archive = TorchFile(file)
        if _is_shard(archive):
            raise CheckpointFormatError(
                f"{file} is one rank's shard of a model: import the folder with those of all, {file.folder}."
            )
        return Source(format="torch-file", folder=file.folder, file=file, archives=(archive,))
    if file.name.endswith(SUFFIX):
        return Source(format="safetensors-file", folder=file.folder, file=file)
    if file.size > 1 and file.read(0, 1) == b"\x80":
        raise CheckpointFormatError(
            f"{file} is a bare pickle, as written by torch before 1.6 and by pickle.dump.\n"
            "If you trust it, load it where it was written, save it again with today's torch.save, and import that."
        )
    raise CheckpointFormatError(f"{file} can't be imported.\n{_KNOWN}")


def _recognise_accelerate(folder: Folder, parts: list[str]) -> Source:
    """Recognize a folder of accelerate's save_state, with a checkpoint of torch for each model and optimizer."""
    accelerate_parts = [
        part for part in parts if part.startswith(("pytorch_model_fsdp_", "optimizer_")) and part.count("/") == 1
    ]
    if not accelerate_parts:
        listed_paths = ", ".join(str(folder.path(part.rstrip("/"))) for part in parts[:8])
        raise CheckpointFormatError(f"{folder} holds several checkpoints: {listed_paths}.\nImport one of them.")
    models_then_optimizers = tuple(sorted(accelerate_parts, reverse=True))
    return Source(format="dcp-parts", folder=folder, parts=models_then_optimizers)


def _is_shard(archive: TorchFile) -> bool:
    return isinstance(archive.content, dict) and xla.METADATA in archive.content
