"""Writes a folder that ``from_pretrained`` reads, from what each rank holds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fsdp_core.checkpoint.collective import run_on_all, run_on_first
from fsdp_core.checkpoint.format.huggingface_folder import INDEX, OWN_FILES, index_text, split_into_files
from fsdp_core.checkpoint.storage.atomic import NewFolder, check_folder
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath, open_folder
from fsdp_core.errors import CheckpointValueError, FSDPError, UnsupportedCapabilityError
from fsdp_core.huggingface.held_model import HeldModel, find_model, is_adapted
from fsdp_core.huggingface.range_writer import FilePlan, allocate, check_covered, plan_tensor, write_ranges
from fsdp_core.huggingface.stored_names import names_to_store, stored_views
from fsdp_core.huggingface.views import View
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.dtypes import DTYPES

__all__ = [
    "OTHER_FILES",
    "FolderContent",
    "SavedFolder",
    "SavesItself",
    "as_dtype",
    "save_pretrained",
    "write_folder",
    "write_model",
]

#: A regular expression for the files that tokenizers and processors write.
OTHER_FILES = (
    r"(added_tokens|tokenizer|tokenizer_config|special_tokens_map|vocab|processor_config|preprocessor_config"
    r"|video_preprocessor_config)\.json|merges\.txt|vocab\.txt|[\w.-]+\.model|chat_template\.jinja"
)


class SavesItself(Protocol):
    """A tokenizer, a processor, or whatever else writes itself into a folder."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write it into a folder."""


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """What was saved.

    Attributes:
        path: The folder.
        files: The files of weights and their index, relative to the folder.
        tensors: The number of tensors in them.
        nbytes: The size of these tensors in bytes.
        bytes_written: How many of these bytes this rank has written.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    bytes_written: int


def save_pretrained(
    module: nn.Module,
    folder: StrPath,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int = 50 * 10**9,
    also: Sequence[SavesItself] = (),
    overwrite: bool = False,
) -> SavedFolder:
    """Write a model into a folder that ``from_pretrained`` of transformers reads. All ranks must call it.

    Nothing is gathered: each rank writes what it holds into its place in the files, at most 16 MiB at a time. Names,
    shapes, the division into files and ``config.json`` are those of the model's own ``save_pretrained()``, also where
    transformers stores a model otherwise than it runs it (each expert of Mixtral by itself) and for tied weights. The
    folder appears under its path when it is complete.

    Args:
        module: A model of transformers that is sharded, or is inside a sharded module: ``self.model`` of a
            LightningModule, or the LightningModule if it holds one such model; or what ``fabric.setup`` returned. A
            model that is not sharded is written by rank 0. Any other module is written under its own names, without
            a configuration.
        folder: A path on a file system that all ranks share, which has nothing yet, or an empty folder.
        dtype: The dtype to store floating-point tensors in; ``None`` for their own.
        max_shard_size: The maximum number of bytes of tensors in a file; a larger tensor gets a file of its own.
        also: What else goes into the folder, such as the tokenizer: rank 0 calls ``save_pretrained(folder)`` of each.
        overwrite: Whether to replace a folder of this kind, once the new one is complete.

    Returns:
        What was saved.

    Raises:
        CheckpointExistsError: There is something in the folder, or something has appeared there when the new one is
            complete; it is unchanged. With ``overwrite``, only what is not of this kind.
        UnsupportedCapabilityError: The folder is in an object store; the model has adapters of PEFT's; or transformers
            stores it in a form that can't be computed from shards.
        ShardingError: It was called inside a step, or another rank did not call it.
        CheckpointError: Writing failed on some rank. The path is as it was.

    Example:
        In a LightningModule, after training::

            def on_train_end(self):
                save_pretrained(self.model, "my-llama", dtype="bfloat16")  # on every rank
    """
    model_shards = find_model(module, "save_pretrained()")
    return write_model(model_shards, folder, dtype=dtype, max_shard_size=max_shard_size, also=also, overwrite=overwrite)


def write_model(
    model_shards: HeldModel,
    folder: StrPath,
    *,
    dtype: str | torch.dtype | None,
    max_shard_size: int,
    also: Sequence[SavesItself],
    overwrite: bool,
) -> SavedFolder:
    """Write a model that was found. The other arguments are those of :func:`save_pretrained`."""
    stored_dtype = None if dtype is None else as_dtype(dtype)
    tied = model_shards.first_names()

    def choose_content(model: nn.Module, state: Mapping[str, ChunkedTensor]) -> FolderContent:
        if is_adapted(model):
            raise UnsupportedCapabilityError(
                f"save_pretrained() writes a model, and PEFT has put adapters into this {type(model).__name__}.\n"
                "Write the adapters alone with fsdp_core.huggingface.save_adapter(), which the base model's folder "
                "belongs to."
            )
        _refuse_own_code(model)
        views = stored_views(model, state, names_to_store(model, state, tied))
        default_dtype = next(
            (tensor.dtype for tensor in state.values() if tensor.dtype.is_floating_point), torch.get_default_dtype()
        )
        sizes = {}
        for name, view in views.items():
            sizes[name] = plan_tensor(view, _stored_dtype(state[view.source].dtype, stored_dtype)).nbytes
        return FolderContent(
            files=split_into_files(sizes, max_shard_size),
            views=views,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            configurations=_configurations(model, stored_dtype or default_dtype),
        )

    return write_folder(
        model_shards, folder, choose_content, dtype=stored_dtype, also=also, overwrite=overwrite, own_files=OWN_FILES
    )


@dataclass(frozen=True, kw_only=True)
class FolderContent:
    """What rank 0 decides to write.

    Attributes:
        files: The names of the tensors in each file.
        views: By the same names, the parts of the module's tensors.
        parameters: The number of elements of parameters, for the index.
        configurations: What writes itself into the folder.
    """

    files: Mapping[str, list[str]]
    views: Mapping[str, View] = field(repr=False)
    parameters: int | None = None
    configurations: Sequence[Callable[[str], Any]] = ()


class _PreparedFolder(NamedTuple):
    """What rank 0 tells the other ranks of a folder: its path, the token in the names of its files, and these files."""

    final_path: str
    token: str
    plans: list[FilePlan]


def write_folder(
    model_shards: HeldModel,
    path: StrPath,
    choose_content: Callable[[nn.Module, Mapping[str, ChunkedTensor]], FolderContent],
    *,
    dtype: torch.dtype | None,
    also: Sequence[SavesItself],
    overwrite: bool,
    own_files: str,
) -> SavedFolder:
    """Write a folder from shards. All ranks call this.

    Args:
        model_shards: The model.
        path: The folder's path; rank 0's value is used.
        choose_content: Called on rank 0 with the model as written and its state; decides what is written.
        dtype: The dtype for floating-point tensors.
        also: What else writes itself into the folder.
        overwrite: Whether a folder may be replaced.
        own_files: A regular expression for the files of a folder that may be replaced.
    """
    runtime = model_shards.runtime
    action = f"saving {os.fspath(path)}"
    state = model_shards.state()
    contents: list[FolderContent] = []  # rank 0's, which is sent to no other rank
    replaceable_files = f"{own_files}|{OTHER_FILES}" if also else own_files

    def prepare() -> _PreparedFolder | None:
        if runtime.rank == 0:
            _refuse_object_store(path)
            check_folder(path, overwrite=overwrite, own_files=replaceable_files)
        with model_shards.unsharded_view() as model:  # on every rank
            if runtime.rank:
                return None
            contents.append(choose_content(model, state))
        new_folder = NewFolder.of(path)
        plans = _plan_files(contents[0], state, dtype)
        return _PreparedFolder(final_path=new_folder.final.root, token=new_folder.token, plans=plans)

    prepared = run_on_first(runtime, action, prepare)
    assert prepared is not None  # rank 0 returns one
    new_folder = NewFolder.of(prepared.final_path, prepared.token)
    plans = prepared.plans
    try:
        _check_boxes(runtime, action, plans, state)
        run_on_all(runtime, action, lambda: None if runtime.rank else allocate(new_folder.folder, plans))
        bytes_written = run_on_all(runtime, action, lambda: write_ranges(new_folder.folder, plans, state))

        def put_in_place() -> None:
            if contents:  # on rank 0
                _write_other_files(new_folder, contents[0], plans, also)
                new_folder.publish(overwrite=overwrite, own_files=replaceable_files)

        run_on_all(runtime, action, put_in_place)
    except FSDPError:  # on every rank
        remove = new_folder.discard if runtime.rank == 0 else lambda: None
        run_on_all(runtime, f"removing what was saved of {new_folder.final}", remove)
        raise
    file_names = [plan.name for plan in plans] + ([INDEX] if len(plans) > 1 else [])
    tensors = [tensor for plan in plans for tensor in plan.tensors.values()]
    return SavedFolder(
        path=new_folder.final.root,
        files=tuple(file_names),
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        bytes_written=bytes_written,
    )


def _plan_files(
    content: FolderContent, state: Mapping[str, ChunkedTensor], dtype: torch.dtype | None
) -> list[FilePlan]:
    plans = []
    for name, tensors in content.files.items():
        views = {tensor: content.views[tensor] for tensor in tensors}
        planned_tensors = {
            key: plan_tensor(view, _stored_dtype(state[view.source].dtype, dtype)) for key, view in views.items()
        }
        plans.append(FilePlan.of(name, planned_tensors))
    return plans


def _check_boxes(runtime: Runtime, action: str, plans: list[FilePlan], state: Mapping[str, ChunkedTensor]) -> None:
    boxes = {
        name: [(tuple(chunk.offsets), tuple(chunk.data.shape)) for chunk in tensor.chunks]
        for name, tensor in state.items()
        if tensor.replica == 0
    }
    boxes_by_rank = runtime.gather_objects_to(boxes)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    run_on_all(runtime, action, lambda: None if boxes_by_rank is None else check_covered(boxes_by_rank, plans, shapes))


def _write_other_files(
    new_folder: NewFolder, content: FolderContent, plans: list[FilePlan], also: Sequence[SavesItself]
) -> None:
    """Write what is not weights."""
    if len(plans) > 1:
        total = sum(tensor.nbytes for plan in plans for tensor in plan.tensors.values())
        text = index_text({name: list(names) for name, names in content.files.items()}, total, content.parameters)
        with new_folder.folder.writing(INDEX) as stream:
            stream.write(text)
    for write_into in (*content.configurations, *(writer.save_pretrained for writer in also)):
        write_into(new_folder.folder.root)


def _stored_dtype(dtype: torch.dtype, chosen_dtype: torch.dtype | None) -> torch.dtype:
    return chosen_dtype if chosen_dtype is not None and dtype.is_floating_point else dtype


def _configurations(model: nn.Module, dtype: torch.dtype) -> list[Callable[[str], Any]]:
    """What writes ``config.json`` and ``generation_config.json``, as the model's own ``save_pretrained()`` would."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return []
    stored_config = copy.deepcopy(config)
    stored_config.dtype = str(dtype).removeprefix("torch.")
    stored_config.architectures = [type(model).__name__]
    writers = [stored_config.save_pretrained]
    generates: Any = getattr(model, "can_generate", lambda: False)
    generation = getattr(model, "generation_config", None)
    if generates() and generation is not None:
        writers.append(generation.save_pretrained)
    return writers


def _refuse_own_code(model: nn.Module) -> None:
    is_remote: Any = getattr(model, "is_remote_code", None)
    if callable(is_remote) and is_remote():
        raise UnsupportedCapabilityError(
            f"{type(model).__name__} is of code that is not in transformers, and the folder would have to hold it.\n"
            "Write the weights alone, `fsdp checkpoint consolidate CHECKPOINT FOLDER --to huggingface`, and copy the "
            "code and config.json of the folder that the model came from."
        )


def _refuse_object_store(path: StrPath) -> None:
    if not open_folder(path).local:
        raise UnsupportedCapabilityError(
            f"{os.fspath(path)} is in an object store, in which ranks can't write parts of one file.\n"
            "Save to a local path that all ranks share; or save a checkpoint there, and convert it with "
            "`fsdp checkpoint consolidate CHECKPOINT FOLDER --to huggingface`."
        )


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating-point dtype, from its name.

    Raises:
        CheckpointValueError: It is none.

    Example:
        >>> as_dtype("bfloat16")
        torch.bfloat16
    """
    torch_dtype = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise CheckpointValueError(
            f"dtype={dtype!r} is no floating-point dtype; write one such as 'bfloat16', 'float16' or 'float32'"
        )
    return torch_dtype
