"""A Trainer's sharded folder written as the one file that a plain Trainer writes, without having it in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_core.checkpoint.anew import begins_anew
from fsdp_core.checkpoint.consolidation import Consolidated
from fsdp_core.checkpoint.conversion import FLOATING, OnProgress, check_dtype, counter, refuse_damaged
from fsdp_core.checkpoint.folder import StrPath
from fsdp_core.checkpoint.plain_data import decode
from fsdp_core.checkpoint.plain_json import read_plain
from fsdp_core.checkpoint.replacing import check_apart, check_file, new_file
from fsdp_core.checkpoint.stored_files import StoredFiles
from fsdp_core.checkpoint.tensor_bytes import TensorBytes, open_files
from fsdp_core.checkpoint.torch_zip import ArrayToWrite, TensorToWrite, TorchZip
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.lightning.file_layout import as_trainers_file

__all__ = ["consolidate_lightning"]


@begins_anew("path")
def consolidate_lightning(
    path: StrPath,
    out: StrPath,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Consolidated:
    """Write a Trainer's checkpoint folder into one ``.ckpt`` file, as a plain Trainer would have written it.

    ``LightningModule.load_from_checkpoint`` and ``Trainer.fit(ckpt_path=…)`` open it with any strategy: it holds the
    weights, the optimizers' state, numbered as torch numbers it, hyper-parameters, loops and callbacks. A few MiB of
    tensors are in memory at once. The names of a tied parameter share one tensor in it.

    Args:
        path: The checkpoint, as a Trainer has saved it: a local path or an fsspec URL.
        out: The file to write: a local path or an fsspec URL.
        dtype: Convert the model's floating-point tensors to this dtype; the optimizers' stay as they are.
        overwrite: Whether to replace a file at ``out``, once the new one is complete.
        verify: Whether to compare the files that are read with their checksums first.
        on_progress: Called as the work goes on.

    Returns:
        What has been written.

    Raises:
        CheckpointFormatError: There is no checkpoint that can be read, or it is damaged.
        CheckpointMismatchError: No Trainer has saved it.
        CheckpointExistsError: Something is at ``out`` that must not be replaced; nothing was written.
        CheckpointValueError: There is no such dtype.
        CheckpointError: The file can't be written.
    """
    check_dtype(dtype)
    files = open_files(path)
    check_apart(out, files.folder)
    check_file(out, overwrite=overwrite)
    nest = _with_places(files, dtype)
    try:
        whole = as_trainers_file(nest)
    except (KeyError, TypeError) as error:
        raise CheckpointFormatError(
            f"{files.folder} has optimizers laid out otherwise than a Trainer saves them: {error!r}. Save it again."
        ) from error
    if whole is None:
        raise CheckpointMismatchError(
            f"{files.folder} was not saved by a Trainer: it holds {', '.join(nest)}, and no loops of Lightning's.\n"
            "Write its model by --to safetensors or --to huggingface, or load it by Fabric.load."
        )
    archive = TorchZip(whole)
    manifest = files.manifest
    total = archive.nbytes + (sum(entry.size for entry in manifest.files.values()) if verify else 0)
    on_bytes = counter(total, on_progress)
    refuse_damaged(files, manifest.files, checksums=verify, on_bytes=on_bytes)
    with new_file(out) as stream:
        archive.write(stream, on_bytes)
    return Consolidated(
        files=(os.path.basename(os.fspath(out)),),
        tensors=archive.tensors,
        nbytes=archive.nbytes,
        aliases={},
        left_out={},
    )


def _with_places(files: StoredFiles, dtype: str | None) -> dict[str, Any]:
    """The state, with a place in a file where each tensor was."""
    reader, manifest = TensorBytes(files), files.manifest
    models = tuple(f"{path}/" for path, kind in manifest.kinds.items() if kind == "model")

    small = set() if manifest.state_tensors is None else set(files.header(manifest.state_tensors))

    def on_tensor(tag: str, name: Any) -> TensorToWrite:
        if tag == "$saved" and isinstance(name, str) and (key := manifest.aliases.get(name, name)) in manifest.tensors:
            converted = key.startswith(models) and manifest.tensors[key].dtype_name in FLOATING
            return TensorToWrite(name=key, source=reader.source(key, dtype_name=dtype if converted else None))
        if tag == "$tensor" and isinstance(name, str) and name in small:
            small.discard(name)  # once, or a small file could ask for any amount of memory
            return ArrayToWrite(name=f"${name}", source=reader.small_source(name))
        where = files.folder.path(manifest.state_file)
        raise CheckpointFormatError(f"{where} points to a tensor {name!r} that isn't there, or points to it twice")

    nest = decode(read_plain(files), on_tensor)
    if not isinstance(nest, Mapping):
        raise CheckpointFormatError(f"{files.folder.path(manifest.state_file)} holds no state: {type(nest).__name__}")
    return dict(nest)
