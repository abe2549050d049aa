"""Writes the model of a checkpoint into a folder that ``from_pretrained`` reads, in one process and a few MiB."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_core.checkpoint.format.state_paths import split_path
from fsdp_core.checkpoint.left_out.restoring import with_base
from fsdp_core.checkpoint.loading import load
from fsdp_core.checkpoint.storage.atomic import check_apart
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath, open_folder
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError, MissingKeyError, UnsupportedCapabilityError
from fsdp_core.huggingface.held_model import HeldModel
from fsdp_core.huggingface.saving import OTHER_FILES, SavedFolder, write_model
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["consolidate_pretrained"]

_MOST_SHOWN = 5


def consolidate_pretrained(
    path: StrPath,
    out: StrPath,
    *,
    config: str | os.PathLike[str],
    key: str | None = None,
    strip_prefix: str = "",
    dtype: str | None = None,
    base: StrPath | None = None,
    max_shard_size: int = 50 * 10**9,
    overwrite: bool = False,
    verify: bool = True,
) -> SavedFolder:
    """Write a model of a checkpoint into a folder, under the names and in the shapes in which transformers stores it.

    Unlike :func:`fsdp_core.checkpoint.consolidate_huggingface`, this builds the model without memory, which needs
    transformers, and so knows how it is stored: what :func:`save_pretrained` writes during training, this writes
    afterwards.

    Args:
        path: The checkpoint: a local path or an fsspec URL.
        out: The folder to write, on a local file system.
        config: A folder with the model's ``config.json``, as that from which training began. Its
            ``generation_config.json`` and the files of its tokenizer are copied.
        key: The model's path in the state; optional if there is one model.
        strip_prefix: What the names in the checkpoint begin with, such as ``"model."``.
        dtype: As in :func:`save_pretrained`.
        base: The folder or file of the base, for a checkpoint that was saved with ``save_frozen=False``.
        max_shard_size: As there.
        overwrite: As there.
        verify: Whether to compare the checksums of the checkpoint first.

    Returns:
        What was saved.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        CheckpointMismatchError: Its model is not the one that the configuration describes.
        CheckpointValueError: The configuration can't be read, or names no class of transformers.
        UnsupportedCapabilityError: transformers is not installed.
        CheckpointExistsError: ``out`` holds something that must not be replaced.
    """
    check_apart(out, open_folder(path))
    model, generation = _build_model(config)
    stored_model = _find_stored_model(path, model, key, strip_prefix, base, verify=verify)
    file_names = [name for name in os.listdir(config) if re.fullmatch(OTHER_FILES, name)] + generation
    copies = [_CopiedFiles(sources=[Path(config, name) for name in sorted(file_names)])] if file_names else []
    return write_model(stored_model, out, dtype=dtype, max_shard_size=max_shard_size, also=copies, overwrite=overwrite)


@dataclass(frozen=True, kw_only=True)
class _CopiedFiles:
    """Files that are copied into a folder."""

    sources: list[Path]

    def save_pretrained(self, save_directory: str) -> None:
        for source in self.sources:
            shutil.copy(source, save_directory)


@dataclass(frozen=True, kw_only=True)
class _StoredModel(HeldModel):
    """A model without memory whose values are in a checkpoint."""

    stored: Mapping[str, ChunkedTensor] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)

    def state(self) -> dict[str, ChunkedTensor]:
        return dict(self.stored)

    def first_names(self) -> dict[str, str]:
        return dict(self.aliases)


def _build_model(config: str | os.PathLike[str]) -> tuple[nn.Module, list[str]]:
    """The model of a configuration, without memory, and the name of its generation's configuration if there is one."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise UnsupportedCapabilityError(
            "how transformers stores a model is known only to transformers, which is not installed.\n"
            "pip install transformers; or pass the file config.json instead of its folder (--config FILE), with which "
            "the tensors keep the names and shapes that they have in the module."
        ) from error
    try:
        model_config = transformers.AutoConfig.from_pretrained(os.fspath(config))
        architectures = list(getattr(model_config, "architectures", None) or [])
    except (OSError, ValueError) as error:
        raise CheckpointValueError(f"can't read a configuration in {os.fspath(config)}: {error}") from error
    cls = getattr(transformers, architectures[0], None) if architectures else None
    if cls is None:
        raise CheckpointValueError(
            f"config.json in {os.fspath(config)} names no class of transformers as its architecture "
            f"({architectures}).\n"
            'Add "architectures": ["LlamaForCausalLM"], with the class of the model that was trained.'
        )
    with torch.device("meta"):
        model: nn.Module = cls(model_config)
    generation_file = "generation_config.json"
    return model, [generation_file] if os.path.isfile(os.path.join(config, generation_file)) else []


def _find_stored_model(
    path: StrPath, model: nn.Module, key: str | None, strip_prefix: str, base: StrPath | None, *, verify: bool
) -> _StoredModel:
    folder = open_folder(path)
    kinds = read_manifest(folder).kinds
    models = {"/".join(split_path(name)): split_path(name) for name, kind in kinds.items() if kind == "model"}
    if key is None and len(models) == 1:
        key = next(iter(models))
    if key not in models:
        raise MissingKeyError(
            f"no model under {key!r} in {folder}. Models in it: {', '.join(map(repr, models)) or 'none'}; pass one as "
            "key= (--key)"
        )
    part: Any = load(path, verify=verify)
    for name in models[key]:
        part = part[name]
    if base is not None:
        part = with_base(part, base)
    saved_tensors = {
        name.removeprefix(strip_prefix): value
        for name, value in part.items()
        if name.startswith(strip_prefix) and isinstance(value, SavedTensor)
    }
    model_state = model.state_dict()
    faults = [f"{name} is missing in the checkpoint" for name in model_state if name not in saved_tensors]
    faults += [f"{name} is only in the checkpoint" for name in saved_tensors if name not in model_state]
    faults += [
        f"{name} has shape {saved_tensors[name].shape} in the checkpoint, and {tuple(value.shape)} in the model"
        for name, value in model_state.items()
        if name in saved_tensors and saved_tensors[name].shape != tuple(value.shape)
    ]
    if faults:
        more = f"\n  … and {len(faults) - _MOST_SHOWN} more" if len(faults) > _MOST_SHOWN else ""
        listed = "\n".join(f"  {fault}" for fault in faults[:_MOST_SHOWN])
        raise CheckpointMismatchError(
            f"the model in {folder} is not the {type(model).__name__} of the configuration:\n{listed}{more}\n"
            "Pass what its names begin with (--strip-prefix model.), or the folder of the model that was trained."
        )
    first_names: dict[str, str] = {}
    aliases = {}
    for name in model_state:
        first_name_of_tensor = first_names.setdefault(saved_tensors[name].key, name)
        if first_name_of_tensor != name:
            aliases[name] = first_name_of_tensor
    return _StoredModel(
        module=model,
        sharded=None,
        prefix="",
        runtime=ProcessGroupRuntime(),
        stored={name: chunked(saved_tensors[name]) for name in model_state},
        aliases=aliases,
    )
