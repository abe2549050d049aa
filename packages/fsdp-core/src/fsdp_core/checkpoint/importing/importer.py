"""Imports another library's checkpoint: recognizes it, reads it piece by piece, and saves it in this format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fsdp_core.checkpoint.format.state_paths import find_part
from fsdp_core.checkpoint.importing.dcp import read_dcp
from fsdp_core.checkpoint.importing.files import open_file, source_of
from fsdp_core.checkpoint.importing.layouts import (
    KEPT_WITH_WEIGHTS,
    TRAINER_MARK,
    Imported,
    convert_trainer_state,
    convert_user_state,
)
from fsdp_core.checkpoint.importing.memory_budget import limited_memory
from fsdp_core.checkpoint.importing.optimizer_states import ParameterOrder
from fsdp_core.checkpoint.importing.recognition import LIGHTNING_META, Source, recognise
from fsdp_core.checkpoint.importing.renaming import rename_parameters
from fsdp_core.checkpoint.importing.safetensors_source import read_safetensors_file, read_safetensors_folder
from fsdp_core.checkpoint.importing.tensors import CountedTensor
from fsdp_core.checkpoint.importing.torch_file import TorchFile
from fsdp_core.checkpoint.importing.xla import read_xla
from fsdp_core.checkpoint.saving import save
from fsdp_core.checkpoint.storage.atomic import check_apart
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.state.chunks import TensorSource

__all__ = ["import_checkpoint", "read_source"]


def import_checkpoint(
    source: StrPath,
    out: StrPath,
    *,
    weights_only: bool = False,
    drop: Iterable[str] = (),
    parameter_order: Sequence[str] | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Imported:
    """Import another library's checkpoint in one process. No code in it is run, and tensors are copied in blocks.

    Args:
        source: A local path or an fsspec URL: a folder of torch.distributed.checkpoint (as written by Lightning's
            sharded strategies, torchtitan and accelerate), a file of torch.save, safetensors, or a folder with the
            shards of torch_xla's FSDP.
        out: The output path, a local path or an fsspec URL.
        weights_only: Whether to omit optimizers and training state.
        drop: Paths in the source to omit, such as ``hyper_parameters/loss``.
        parameter_order: The parameter names in the order of the optimizers' parameters, for sources that number them.
        strip_prefix: A prefix of every name in the source, to be removed.
        add_prefix: A prefix to add to every name, such as ``"model."`` for a LightningModule that holds the model as
            ``self.model``. The output is then a Trainer checkpoint; its training begins at the first epoch if the
            source is not from a Trainer.
        overwrite: Whether a checkpoint at ``out`` may be replaced.
        on_bytes: Called with the number of bytes read so far and the total, to show progress.

    Returns:
        The import: the nest, its models and optimizers, and a description of the source.

    Raises:
        CheckpointFormatError: The source is damaged, or its format can't be imported.
        CheckpointValueError: It holds values that are neither plain data nor tensors; the message lists their paths.
        CheckpointMismatchError: It is ambiguous which parameters an optimizer's state belongs to, or names can't be
            changed as requested.
        CheckpointExistsError: ``out`` holds something that must not be replaced.
    """
    target, source_folder = open_folder(out), open_folder(source)
    check_apart(out, source_folder)
    if target.kind() != "missing" and not overwrite:
        raise CheckpointExistsError(f"{target} already exists: import to another path, or type --overwrite.")
    with limited_memory(lambda: _source_bytes(source)):  # covers the save too, which opens pieces of the source
        with _name_source_in_errors(source_folder):
            imported = read_source(source, weights_only=weights_only, drop=drop, parameter_order=parameter_order)
            imported = rename_parameters(imported, strip_prefix=strip_prefix, add_prefix=add_prefix)
        _save(imported, out, overwrite=overwrite, on_bytes=on_bytes)
    return imported


def _save(imported: Imported, out: StrPath, *, overwrite: bool, on_bytes: Callable[[int, int], None] | None) -> None:
    state = imported.state
    if on_bytes is not None:
        total = sum(_sizes(find_part(imported.state, path) for path in imported.kinds))
        state = _count_reads(imported.state, _ReadProgress(total, on_bytes))
    save(
        out,
        state,
        runtime=ProcessGroupRuntime(),
        strategy="import",
        kinds=imported.kinds,
        aliases=imported.aliases,
        overwrite=overwrite,
    )


class _ReadProgress:
    """Tells how many of all bytes have been read, each time that some are."""

    def __init__(self, total: int, on_bytes: Callable[[int, int], None]) -> None:
        self._total = total
        self._on_bytes = on_bytes
        self._bytes_read = 0

    def add(self, nbytes: int) -> None:
        self._bytes_read += nbytes
        self._on_bytes(self._bytes_read, self._total)


def _source_bytes(source: StrPath) -> int:
    """Return the size of a file, or of all files in a folder; links that lead out of the folder are not counted."""
    folder, name = source_of(source)
    if name is not None:
        return folder.size(name) or 0
    total = 0
    for name in folder.files():
        with suppress(CheckpointFormatError):  # a link that leads out of the folder
            total += folder.size(name) or 0
    return total


@contextmanager
def _name_source_in_errors(source_folder: Folder) -> Iterator[None]:
    """Add the source to every error, and convert errors caused by invalid content to ours."""
    try:
        yield
    except CheckpointError as error:
        if str(source_folder) in str(error):
            raise
        raise type(error)(f"can't import {source_folder}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"can't import {source_folder}: it holds data that no library writes ({type(error).__name__}: {error}). "
            "Restore it from a backup."
        ) from error


def read_source(
    source: StrPath,
    *,
    weights_only: bool = False,
    drop: Iterable[str] = (),
    parameter_order: Sequence[str] | None = None,
) -> Imported:
    """Read a source without its large tensors. The arguments are those of :func:`import_checkpoint`."""
    with limited_memory(lambda: _source_bytes(source)):
        return _read_source(source, weights_only, drop, parameter_order)


def _read_source(
    source: StrPath, weights_only: bool, drop: Iterable[str], parameter_order: Sequence[str] | None
) -> Imported:
    recognised = recognise(source)
    order = ParameterOrder(parameter_order)
    drop = tuple(drop)
    if recognised.format == "dcp":
        return _import_dcp(recognised, order, drop, weights_only)
    if recognised.format == "dcp-parts":
        return _import_accelerate(recognised, order, drop, weights_only)
    if recognised.format == "torch-file":
        return _import_torch_file(recognised.archives[0], order, drop, weights_only)
    if recognised.format == "xla":
        nest = read_xla(recognised.archives, order, drop=drop, weights_only=weights_only)
        return convert_user_state(
            nest, order, f"{len(recognised.archives)} shards of torch_xla's FSDP", weights_only=weights_only
        )
    if recognised.file is not None:
        tensors: Mapping[str, Any] = read_safetensors_file(recognised.file)
    else:
        tensors = read_safetensors_folder(recognised.folder)
    return convert_user_state({"model": _drop_tensors(tensors, drop, source)}, order, "safetensors")


def _import_dcp(source: Source, order: ParameterOrder, drop: tuple[str, ...], weights_only: bool) -> Imported:
    trainer_state: dict[str, Any] = {}
    is_from_lightning = source.folder.size(LIGHTNING_META) is not None
    if is_from_lightning:
        trainer_state, drop = _read_meta(TorchFile(open_file(source.folder, LIGHTNING_META)), drop, weights_only)
    nest = read_dcp(source.folder, drop=drop, tensors_only=weights_only)
    if TRAINER_MARK not in trainer_state:
        name = "a folder of Lightning's Fabric" if is_from_lightning else "a folder of torch.distributed.checkpoint"
        return convert_user_state({**trainer_state, **nest}, order, name, weights_only=weights_only)
    # Which of Lightning's strategies wrote it shows in the key of the model.
    if "state_dict" in nest:
        key, name = "state_dict", "ModelParallelStrategy"
    else:
        key, name = "model", "FSDPStrategy"
    if key not in nest:
        raise CheckpointFormatError(f"{source.folder} holds no model, but {', '.join(nest)}")
    model = nest.pop(key)
    optimizer_keys = [key for key in nest if key.startswith("optimizer_") and key.removeprefix("optimizer_").isdigit()]
    optimizers = None
    if optimizer_keys and not weights_only:
        optimizers = [nest.pop(f"optimizer_{index}", None) for index in range(len(optimizer_keys))]
    if nest and not weights_only:
        raise CheckpointFormatError(
            f"{source.folder} holds {', '.join(nest)}, which Lightning's {name} does not write."
        )
    return convert_trainer_state(model, optimizers, trainer_state, order, f"a folder of Lightning's {name}")


def _read_meta(archive: TorchFile, drop: tuple[str, ...], weights_only: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the data that Lightning saves next to the shards, and the paths to drop that are not in it."""
    if not isinstance(archive.content, dict):
        raise CheckpointFormatError(f"{archive.file} holds no dict, so it is none of Lightning's")
    paths_in_archive = tuple(path for path in drop if path.partition("/")[0] in archive.content)
    other_paths = tuple(path for path in drop if path not in paths_in_archive)
    content = _read_archive(archive, paths_in_archive, keep=KEPT_WITH_WEIGHTS if weights_only else None)
    return content, other_paths


def _read_archive(archive: TorchFile, drop: tuple[str, ...], *, keep: Iterable[str] | None) -> Any:
    """Read the content of a file, without the paths to drop; of a dict, only the keys to keep, all if ``None``."""
    reader = archive.reader(drop)
    content = archive.content
    if keep is not None and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key in set(keep)}
    state = reader.read(content)
    reader.raise_if_refused(archive.file)
    if keep is None:
        reader.refuse_unfound_drops(archive.file, map(str, state) if isinstance(state, dict) else ())
    return state


def _import_accelerate(source: Source, order: ParameterOrder, drop: tuple[str, ...], weights_only: bool) -> Imported:
    """Read the folder of each model and optimizer; keys are ``model``, ``model_1``, …, and likewise of optimizers."""
    nest: dict[str, Any] = {}
    for part in source.parts:
        name, _, number = part.rstrip("/").rpartition("_")
        key = "model" if name == "pytorch_model_fsdp" else "optimizer"
        if key == "optimizer" and weights_only:
            continue
        content = read_dcp(source.folder, part, drop=drop, tensors_only=weights_only)
        nest[key if number == "0" else f"{key}_{number}"] = content.get(key, content)
    return convert_user_state(nest, order, "a folder of accelerate's save_state", weights_only=weights_only)


def _import_torch_file(
    archive: TorchFile, order: ParameterOrder, drop: tuple[str, ...], weights_only: bool
) -> Imported:
    content = archive.content
    if isinstance(content, dict) and TRAINER_MARK in content and "state_dict" in content:
        keep = KEPT_WITH_WEIGHTS | {"state_dict"} if weights_only else None
        trainer_content = _read_archive(archive, drop, keep=keep)
        model, optimizers = trainer_content.pop("state_dict"), trainer_content.pop("optimizer_states", None)
        return convert_trainer_state(
            model, optimizers, trainer_content, order, "a full checkpoint of Lightning's Trainer"
        )
    nest = _read_models(archive, drop) if weights_only else _read_archive(archive, drop, keep=None)
    if not isinstance(nest, dict):
        raise CheckpointFormatError(
            f"{archive.file} does not hold a dict, but {type(nest).__name__}: it contains no model."
        )
    return convert_user_state(
        {str(key): value for key, value in nest.items()}, order, "a file of torch.save", weights_only=weights_only
    )


def _read_models(archive: TorchFile, drop: tuple[str, ...]) -> Any:
    """Read those values of a file that hold only plain data and tensors; the others are not models."""
    if not isinstance(archive.content, dict):
        return _read_archive(archive, drop, keep=None)
    state = {}
    for key, value in archive.content.items():
        reader = archive.reader(drop)
        part = reader.read({key: value})
        if not reader.refused:
            state.update(part)
    return state


def _drop_tensors(tensors: Mapping[str, Any], drop: tuple[str, ...], source: StrPath) -> dict[str, Any]:
    for name in drop:
        if name not in tensors:
            raise CheckpointFormatError(f"there is no tensor {name!r} to drop in {source}")
    return {name: tensor for name, tensor in tensors.items() if name not in drop}


def _sizes(value: Any) -> Iterable[int]:
    """Yield the sizes in bytes of all sources in a nest."""
    if isinstance(value, TensorSource):
        yield math.prod(value.shape) * value.dtype.itemsize
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _sizes(item)


def _count_reads(value: Any, progress: _ReadProgress) -> Any:
    """Return a nest whose sources add to a progress what is read of them."""
    if isinstance(value, TensorSource):
        return CountedTensor(source=value, on_bytes=progress.add)
    if type(value) is dict:
        return {key: _count_reads(item, progress) for key, item in value.items()}
    return [_count_reads(item, progress) for item in value] if type(value) is list else value
