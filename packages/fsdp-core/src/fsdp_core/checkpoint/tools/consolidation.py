"""Consolidates a sharded model into one safetensors file, or a folder in Hugging Face's layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_core.checkpoint.format.huggingface_folder import INDEX, OWN_FILES, index_text, split_into_files
from fsdp_core.checkpoint.format.state_paths import split_path
from fsdp_core.checkpoint.storage.atomic import check_apart, check_file, check_folder, new_file, new_folder
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.checkpoint.storage.plain_json import children, part_at, read_plain, tensor_of
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.tensor_bytes import BytesSource, TensorBytes, open_files, write_sources
from fsdp_core.checkpoint.tools.conversion import FLOATING, OnProgress, check_dtype, counter, refuse_damaged
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointValueError, MissingKeyError

__all__ = ["Consolidated", "consolidate_huggingface", "consolidate_safetensors"]

_MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """The result of a consolidation.

    Attributes:
        files: The files written, relative to the folder; for a single file, its own name.
        tensors: The number of tensors in the files.
        nbytes: The size of these tensors in bytes.
        aliases: Additional names of tied parameters that are not in the files, each with the name that is.
        left_out: Names in the model's state that are not in the files, each with the reason.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    aliases: Mapping[str, str]
    left_out: Mapping[str, str]


@retries_if_replaced("path")
def consolidate_safetensors(
    path: StrPath,
    out: StrPath,
    *,
    key: str | None = None,
    strip_prefix: str = "",
    dtype: str | None = None,
    copy_tied: bool = False,
    base: StrPath | None = None,
    trained_only: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Consolidated:
    """Write a model of a checkpoint into one safetensors file, under the names of the module.

    At most a few MiB are in memory at once, and torch is imported only for ``dtype``.

    Tensors in a safetensors file can't share memory, so a tied parameter is stored once, under the first of its names.
    The file's metadata lists the other names, ``{"lm_head.weight": "wte.weight"}``, as
    ``safetensors.torch.save_model`` does; ``safetensors.torch.load_model`` fills them.

    Args:
        path: The checkpoint: a local path or an fsspec URL.
        out: The file to write: a local path or an fsspec URL.
        key: The model's path in the state; optional if there is one model.
        strip_prefix: Write only tensors whose names begin with this prefix, and remove it; such as ``"model."``, for
            the model that a LightningModule holds as ``self.model``.
        dtype: Convert floating-point tensors to this dtype, such as ``"bfloat16"``.
        copy_tied: Whether to write a tied parameter under each of its names.
        base: The folder or file of the base, for a checkpoint that was saved with ``save_frozen=False``: what it leaves
            out is read from there, and compared with the digests that were saved. This imports torch.
        trained_only: Whether to write what such a checkpoint holds, and nothing of its base.
        overwrite: Whether to replace a file at ``out``, once the new one is complete.
        verify: Whether to verify the checksums of the required files first.
        on_progress: Called with the progress.

    Returns:
        The result.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        CheckpointMismatchError: It holds no such model, or no name begins with the prefix; or it leaves tensors out,
            and no base is named, or another one.
        CheckpointExistsError: ``out`` holds something that must not be replaced; nothing was written.
        CheckpointError: The file can't be written.
    """
    files = open_files(path)
    check_apart(out, files.folder)
    check_file(out, overwrite=overwrite)
    choice = _BaseChoice(path=base, is_left_out=trained_only)
    weights = _Weights(files, key=key, strip_prefix=strip_prefix, dtype=dtype, copy_tied=copy_tied, base=choice)
    on_bytes = counter(weights.count_bytes(verify=verify), on_progress)
    weights.check_files(checksums=verify, on_bytes=on_bytes)
    with new_file(out) as stream:
        write_sources(stream, weights.sources, metadata=weights.aliases, on_bytes=on_bytes)
    return weights.report([os.path.basename(os.fspath(out))])


@retries_if_replaced("path")
def consolidate_huggingface(
    path: StrPath,
    out: StrPath,
    *,
    key: str | None = None,
    strip_prefix: str = "",
    dtype: str | None = None,
    copy_tied: bool = False,
    base: StrPath | None = None,
    trained_only: bool = False,
    max_shard_size: int = 5 * 10**9,
    config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Consolidated:
    """Write a model of a checkpoint into a folder that ``from_pretrained`` of Hugging Face's libraries reads.

    It holds ``model.safetensors``, or several shards and ``model.safetensors.index.json``. Tied parameters are stored
    once, as by ``save_pretrained``; ``from_pretrained`` ties them again according to the model's configuration.

    Args:
        path: As in :func:`consolidate_safetensors`.
        out: The folder to write: a local path or an fsspec URL.
        key: As in :func:`consolidate_safetensors`.
        strip_prefix: As there.
        dtype: As there.
        copy_tied: As there.
        base: As there.
        trained_only: As there.
        max_shard_size: The maximum number of bytes of tensors in a file; a larger tensor gets a file of its own.
        config: A local ``config.json`` to copy into the folder.
        overwrite: Whether to replace such a folder, once the new one is complete.
        verify: As there.
        on_progress: As there.

    Returns:
        The result.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        CheckpointMismatchError: It holds no such model, or no name begins with the prefix; or it leaves tensors out,
            and no base is named, or another one.
        CheckpointExistsError: ``out`` holds something that must not be replaced; nothing was written.
        CheckpointValueError: ``config`` is not a JSON file.
        CheckpointError: The folder can't be written.
    """
    files = open_files(path)
    check_apart(out, files.folder)
    check_folder(out, overwrite=overwrite, own_files=OWN_FILES)
    if config is not None:
        _check_config(config)
    choice = _BaseChoice(path=base, is_left_out=trained_only)
    weights = _Weights(files, key=key, strip_prefix=strip_prefix, dtype=dtype, copy_tied=copy_tied, base=choice)
    on_bytes = counter(weights.count_bytes(verify=verify), on_progress)
    shards = split_into_files({name: source.nbytes for name, source in weights.sources.items()}, max_shard_size)
    weights.check_files(checksums=verify, on_bytes=on_bytes)
    with new_folder(out, overwrite=overwrite, own_files=OWN_FILES) as folder:
        for name, shard in shards.items():
            with folder.writing(name) as stream:
                write_sources(stream, {tensor: weights.sources[tensor] for tensor in shard}, on_bytes=on_bytes)
        file_names = list(shards)
        if len(shards) > 1:
            with folder.writing(INDEX) as stream:
                stream.write(index_text(shards, weights.nbytes))
            file_names.append(INDEX)
        if config is not None:
            with open(config, "rb") as source, folder.writing("config.json") as stream:
                shutil.copyfileobj(source, stream)
            file_names.append("config.json")
    return weights.report(file_names)


@dataclass(frozen=True, kw_only=True)
class _BaseChoice:
    """What to do about tensors that a checkpoint leaves out: read them from a base, or leave them out, too."""

    path: StrPath | None
    is_left_out: bool

    def __post_init__(self) -> None:
        if self.path is not None and self.is_left_out:
            raise CheckpointValueError(
                "base= and trained_only=True can't be combined (--with-base, --trained-only): leave one of them out"
            )


class _Weights:
    """The tensors of one model, by their names in the output."""

    def __init__(
        self,
        files: StoredFiles,
        *,
        key: str | None,
        strip_prefix: str,
        dtype: str | None,
        copy_tied: bool,
        base: _BaseChoice,
    ) -> None:
        check_dtype(dtype)
        self.files = files
        self.sources: dict[str, BytesSource] = {}
        self.aliases: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._keys: set[str] = set()
        keys_in_base: dict[str, str] = {}  # by name in the output
        first_names: dict[str, str] = {}  # by the key of a stored tensor
        reader = TensorBytes(files)
        skipped_count = 0
        for full_name, node in children(self._model_node(key)) or []:
            if not full_name.startswith(strip_prefix):
                self.left_out[full_name] = f"does not begin with {strip_prefix!r}"
                skipped_count += 1
                continue
            name = full_name.removeprefix(strip_prefix)
            tensor = tensor_of(node)
            if tensor is None:
                self.left_out[full_name] = "is not a tensor"
                continue
            if tensor[0] != "$saved":
                raise CheckpointFormatError(
                    f"{files.folder} holds {full_name!r} of its model among its plain data, where no save puts it: it "
                    "is damaged. Restore it from a copy, or use an earlier checkpoint."
                )
            stored_key = files.manifest.aliases.get(tensor[1], tensor[1])
            if stored_key in files.manifest.left_out and base.is_left_out:
                self.left_out[full_name] = "was not trained: the base has it"
                continue
            if stored_key in first_names and not copy_tied:
                self.aliases[name] = first_names[stored_key]
                continue
            first_names.setdefault(stored_key, name)
            if stored_key in files.manifest.left_out:
                keys_in_base[name] = stored_key
                continue
            self._keys.add(stored_key)
            is_floating = files.manifest.tensors[stored_key].dtype_name in FLOATING
            self.sources[name] = reader.source(stored_key, dtype_name=dtype if is_floating else None)
        if keys_in_base:
            self._read_from_base(keys_in_base, base.path, dtype)
        if not self.sources:
            left_out_names = list(self.left_out)
            more = f" and {len(left_out_names) - _MOST_SHOWN} more" if len(left_out_names) > _MOST_SHOWN else ""
            listed = ", ".join(left_out_names[:_MOST_SHOWN]) + more
            prefix_text = f" that begins with {strip_prefix!r}" if skipped_count else ""
            raise CheckpointMismatchError(
                f"the model in {files.folder} has no tensor{prefix_text}; it has {listed or 'nothing'}.\n"
                "Pass another prefix (--strip-prefix), or another model's path (--key)."
            )

    def _read_from_base(self, keys: Mapping[str, str], base: StrPath | None, dtype: str | None) -> None:
        """Add the tensors that the checkpoint leaves out, by their names in the output."""
        from fsdp_core.checkpoint.tools.base_sources import bytes_in_base, sources_in_base

        instead = (
            "Name its folder or file as base= (--with-base BASE); or write what was trained alone, with "
            "trained_only=True (--trained-only)."
        )
        boxes = sources_in_base(self.files, list(dict.fromkeys(keys.values())), base, instead=instead)
        for name, key in keys.items():
            saved_dtype = self.files.manifest.left_out[key].dtype_name
            self.sources[name] = bytes_in_base(boxes[key], dtype if dtype and saved_dtype in FLOATING else saved_dtype)

    @property
    def nbytes(self) -> int:
        """The size of the tensors to write."""
        return sum(source.nbytes for source in self.sources.values())

    def _model_node(self, key: str | None) -> object:
        manifest = self.files.manifest
        models = {path: split_path(path) for path, part_type in manifest.kinds.items() if part_type == "model"}
        listed = ", ".join(repr("/".join(keys)) for keys in models.values()) or "none"
        if key is None and len(models) != 1:
            raise CheckpointMismatchError(
                f"{self.files.folder} holds {len(models)} models ({listed}): choose one with key= (--key)"
            )
        model_key = next(iter(models)) if key is None else key
        keys = next((keys for path, keys in models.items() if model_key in (path, "/".join(keys))), None)
        if keys is None:
            raise MissingKeyError(
                f"no model under {key!r} in {self.files.folder}. Models in it: {listed}; pass one as key= (--key)"
            )
        part: object = part_at(read_plain(self.files), keys)
        return part

    def _needed_files(self) -> list[str]:
        tensors, manifest = self.files.manifest.tensors, self.files.manifest
        named = {manifest.state_file}.union(*(tensors[key].file_names() for key in self._keys))
        return [name for name in manifest.files if name in named]

    def count_bytes(self, *, verify: bool) -> int:
        """Return the number of bytes to verify and to write."""
        bytes_to_verify = sum(self.files.manifest.files[name].size for name in self._needed_files()) if verify else 0
        return self.nbytes + bytes_to_verify

    def check_files(self, *, checksums: bool, on_bytes: Callable[[int], None]) -> None:
        """Refuse damaged files, by their checksums or only by sizes and headers."""
        refuse_damaged(self.files, self._needed_files(), checksums=checksums, on_bytes=on_bytes)

    def report(self, file_names: Sequence[str]) -> Consolidated:
        """Return the result."""
        return Consolidated(
            files=tuple(file_names),
            tensors=len(self.sources),
            nbytes=self.nbytes,
            aliases=self.aliases,
            left_out=self.left_out,
        )


def _check_config(config: str | os.PathLike[str]) -> None:
    try:
        with open(config, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError) as error:
        raise CheckpointValueError(f"can't read the configuration {os.fspath(config)}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointValueError(f"{os.fspath(config)} is not a model configuration: it is not a JSON object")
