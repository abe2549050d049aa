"""Converts a Trainer's or Fabric's folder to a plain Trainer's file, without holding it in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

from fsdp_core.checkpoint.format.plain_data import decode
from fsdp_core.checkpoint.format.state_paths import split_path
from fsdp_core.checkpoint.storage.atomic import check_apart, check_file, new_file
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.checkpoint.storage.plain_json import read_plain
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.checkpoint.storage.stored_files import StoredFiles
from fsdp_core.checkpoint.storage.tensor_bytes import BytesSource, TensorBytes, open_files
from fsdp_core.checkpoint.tools.consolidation import Consolidated
from fsdp_core.checkpoint.tools.conversion import FLOATING, OnProgress, check_dtype, counter, refuse_damaged
from fsdp_core.checkpoint.tools.torch_zip import ArrayToWrite, TensorToWrite, TorchZip
from fsdp_core.errors import CheckpointError, CheckpointFormatError, CheckpointMismatchError, MissingKeyError
from fsdp_core.lightning.checkpoints.full.layout import as_trainers_file, from_fabric

__all__ = ["consolidate_lightning"]


@retries_if_replaced("path")
def consolidate_lightning(
    path: StrPath,
    out: StrPath,
    *,
    key: str | None = None,
    optimizer_keys: Sequence[str] = (),
    dtype: str | None = None,
    base: StrPath | None = None,
    overwrite: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Consolidated:
    """Convert a checkpoint folder to one ``.ckpt`` file, as a plain Trainer would have written it.

    ``LightningModule.load_from_checkpoint`` and ``Trainer.fit(ckpt_path=…)`` open it with any strategy: it holds the
    weights, the optimizers' state (numbered as in torch), hyper-parameters, loops and callbacks. A few MiB of tensors
    are in memory at a time. The names of a tied parameter share one tensor.

    Of a folder saved by Fabric, one model goes under ``"state_dict"``, its optimizers go under ``"optimizer_states"``,
    and everything else keeps the user's keys. There are no loops: a Trainer resumes the weights and optimizers, and
    counts from 0.

    Args:
        path: The checkpoint folder of a Trainer or Fabric: a local path or an fsspec URL.
        out: The file to write: a local path or an fsspec URL.
        key: The model's path in a checkpoint of Fabric; optional if there is one model.
        optimizer_keys: The paths of its optimizers there, in the order in which ``configure_optimizers`` returns them;
            optional if there is one optimizer and one model.
        dtype: Convert the model's floating-point tensors to this dtype; the optimizers' stay as they are.
        base: The folder or file of the base, for a checkpoint that was saved with ``save_frozen=False``.
        overwrite: Whether to replace a file at ``out``, once the new one is complete.
        verify: Whether to verify the checksums of the files first.
        on_progress: Called as the work progresses.

    Returns:
        What was written.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        CheckpointMismatchError: It holds no such model or optimizers, or the choice is ambiguous; or it leaves tensors
            out, and no base is named, or another one.
        CheckpointExistsError: ``out`` exists and must not be replaced; nothing was written.
        CheckpointValueError: The dtype does not exist.
        CheckpointError: The file can't be written.
    """
    check_dtype(dtype)
    files = open_files(path)
    check_apart(out, files.folder)
    check_file(out, overwrite=overwrite)
    nest = _with_tensor_sources(files, dtype, base)
    left_out: list[str] = []
    try:
        contents = as_trainers_file(nest)
        if contents is None:
            model, optimizers = _choose_model_and_optimizers(files, nest, key, optimizer_keys)
            left_out = _left_out_keys(files, model, optimizers)
            contents = from_fabric(nest, model, optimizers, left_out=left_out, version=_lightning_version())
        elif key not in (None, "model") or optimizer_keys:
            raise CheckpointMismatchError(
                f"{files.folder} was saved by a Trainer: its model is 'model', and it holds all optimizers in order.\n"
                "Leave out key= and optimizer_keys= (--key, --optimizer-key), which are for checkpoints of Fabric."
            )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointFormatError(
            f"{files.folder} has optimizers in a layout that no strategy saves: {error!r}. Save it again."
        ) from error
    archive = TorchZip(contents)
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
        left_out=dict.fromkeys(left_out, "is not of this model"),
    )


def _choose_model_and_optimizers(
    files: StoredFiles, nest: Mapping[str, Any], key: str | None, optimizer_keys: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """Choose which model and optimizers of Fabric to write, by their keys in the state.

    Raises:
        MissingKeyError: A given key does not exist.
        CheckpointMismatchError: The choice is ambiguous, or an optimizer belongs to another model.
    """
    models, optimizers = _keys_of_kind(files, "model"), _keys_of_kind(files, "optimizer")
    if not models:
        raise CheckpointMismatchError(
            f"{files.folder} holds no model, but {', '.join(map(repr, nest)) or 'nothing'}.\nA Lightning file "
            'holds a model: save it with fabric.save(path, {"model": model, ...}), as fabric.setup() returned it.'
        )
    if key is None and len(models) > 1:
        raise CheckpointMismatchError(
            f"{files.folder} holds {len(models)} models ({_list_keys(models)}): choose one with key= (--key)"
        )
    model = models[0] if key is None else key
    for optimizer in optimizer_keys:
        if optimizer not in optimizers:
            raise MissingKeyError(
                f"no optimizer under {optimizer!r} in {files.folder}. It holds {_list_keys(optimizers)}; pass one as "
                "optimizer_keys= (--optimizer-key)"
            )
    if model not in models:
        raise MissingKeyError(
            f"no model under {model!r} in {files.folder}. It holds {_list_keys(models)}; pass one as key= (--key)"
        )
    for optimizer in optimizer_keys:
        foreign = _trained_names(nest, optimizer) - nest[model].keys()
        if foreign:
            raise CheckpointMismatchError(
                f"the optimizer {optimizer!r} in {files.folder} trains {min(foreign)!r}, which is not in the model "
                f"{model!r}.\nThe optimizers there are {_list_keys(optimizers)}: pass those of {model!r} as "
                "optimizer_keys= (--optimizer-key, once for each)."
            )
    if optimizer_keys:
        return model, tuple(optimizer_keys)
    candidates = [optimizer for optimizer in optimizers if _trained_names(nest, optimizer) <= nest[model].keys()]
    other_models = []  # to which a candidate may belong as well, by the names of its parameters
    for other_model in models:
        other_names = nest[other_model].keys()
        if other_model != model and any(_trained_names(nest, optimizer) <= other_names for optimizer in candidates):
            other_models.append(other_model)
    if len(candidates) > 1 or other_models:
        owners = " and ".join(map(repr, [model, *other_models]))
        raise CheckpointMismatchError(
            f"{files.folder} holds optimizers ({_list_keys(candidates)}) that may belong to {owners}: pass those "
            f"of {model!r}, in the order in which configure_optimizers() returns them, as optimizer_keys= "
            "(--optimizer-key, once for each)"
        )
    return model, tuple(candidates)


def _trained_names(nest: Mapping[str, Any], optimizer: str) -> set[str]:
    """The names of the parameters that an optimizer holds."""
    return {name for group in nest[optimizer]["param_groups"] for name in group["params"]}


def _keys_of_kind(files: StoredFiles, kind: Literal["model", "optimizer"]) -> list[str]:
    """The user's keys of models, or of optimizers, in a checkpoint of Fabric."""
    return ["/".join(split_path(path)) for path, path_kind in files.manifest.kinds.items() if path_kind == kind]


def _list_keys(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys)) or "none"


def _left_out_keys(files: StoredFiles, model: str, optimizers: Sequence[str]) -> list[str]:
    keys = [*_keys_of_kind(files, "model"), *_keys_of_kind(files, "optimizer")]
    return [key for key in keys if key not in (model, *optimizers)]


def _lightning_version() -> str:
    """The Lightning version whose layout is written: the installed one, or else the first with this layout."""
    for package in ("lightning", "pytorch-lightning"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "2.0.0"


def _sources_in_base(files: StoredFiles, base: StrPath | None, dtype: str | None) -> dict[str, BytesSource]:
    """The tensors that the checkpoint leaves out, by key."""
    # imported here, since it takes memory: most checkpoints leave nothing out
    from fsdp_core.checkpoint.tools.base_sources import bytes_in_base, sources_in_base

    left_out = files.manifest.left_out
    instead = "Name its folder or file as base= (--with-base BASE)."
    sources = {}
    for key, boxes in sources_in_base(files, list(left_out), base, instead=instead).items():
        saved_dtype = left_out[key].dtype_name
        sources[key] = bytes_in_base(boxes, dtype if dtype is not None and saved_dtype in FLOATING else saved_dtype)
    return sources


def _with_tensor_sources(files: StoredFiles, dtype: str | None, base: StrPath | None) -> dict[str, Any]:
    """The state, with each tensor replaced by its location in a file."""
    reader = TensorBytes(files)
    manifest = files.manifest
    in_base = {} if not manifest.left_out else _sources_in_base(files, base, dtype)
    model_prefixes = tuple(f"{path}/" for path, kind in manifest.kinds.items() if kind == "model")
    # The names of tensors in plain data that no reference has used yet.
    unused_names = set() if manifest.state_tensors is None else set(files.header(manifest.state_tensors))

    def find_source(tag: str, name: Any) -> TensorToWrite:
        """The source of a tensor to which the plain data refers by a tag and a name."""
        key = manifest.aliases.get(name, name) if isinstance(name, str) else None
        if tag == "$saved" and key is not None and key in manifest.tensors:  # of a model or an optimizer
            is_converted = key.startswith(model_prefixes) and manifest.tensors[key].dtype_name in FLOATING
            return TensorToWrite(name=key, source=reader.source(key, dtype_name=dtype if is_converted else None))
        if tag == "$saved" and key is not None and key in in_base:
            return TensorToWrite(name=key, source=in_base[key])
        if tag == "$tensor" and isinstance(name, str) and name in unused_names:  # in plain data
            unused_names.discard(name)  # only once, or a small file could request any amount of memory
            return ArrayToWrite(name=f"${name}", source=reader.small_source(name))
        state_file = files.folder.path(manifest.state_file)
        raise CheckpointFormatError(
            f"{state_file} refers to a tensor {name!r} that does not exist, or refers to it twice"
        )

    try:
        nest = decode(read_plain(files), find_source)
    except RecursionError as error:
        raise CheckpointFormatError(f"{files.folder.path(manifest.state_file)} is nested too deeply") from error
    if not isinstance(nest, Mapping):
        raise CheckpointFormatError(
            f"{files.folder.path(manifest.state_file)} does not hold a state, but {type(nest).__name__}"
        )
    return dict(nest)
