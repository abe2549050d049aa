"""Writes the adapters of PEFT alone, from what each rank holds of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.huggingface.held_model import find_model, is_adapted
from fsdp_core.huggingface.saving import FolderContent, SavedFolder, SavesItself, as_dtype, write_folder
from fsdp_core.huggingface.views import views_of
from fsdp_core.sharding.refusals.files_of_shards import read_for_names
from fsdp_core.state.chunks import ChunkedTensor

__all__ = ["save_adapter"]

_WEIGHTS = "adapter_model.safetensors"
_OWN_FILES = r"adapter_(model\.safetensors|config\.json)"


def save_adapter(
    module: nn.Module,
    folder: StrPath,
    *,
    adapter_name: str = "default",
    dtype: str | torch.dtype | None = None,
    save_embedding_layers: bool | str = "auto",
    also: Sequence[SavesItself] = (),
    overwrite: bool = False,
) -> SavedFolder:
    """Write adapters into a folder that ``PeftModel.from_pretrained`` reads. All ranks must call it.

    The folder holds ``adapter_model.safetensors`` and ``adapter_config.json``, with the names and values that PEFT's
    own ``save_pretrained()`` would write. Nothing is gathered: each rank writes what it holds of the adapter.

    Args:
        module: A model of PEFT's that is sharded, or is inside a sharded module, as in :func:`save_pretrained`.
        folder: A path on a file system that all ranks share, which has nothing yet, or an empty folder.
        adapter_name: Which adapter.
        dtype: The dtype to store floating-point tensors in; ``None`` for their own.
        save_embedding_layers: As PEFT's ``save_pretrained()`` takes it.
        also: What else goes into the folder, such as the tokenizer.
        overwrite: Whether to replace a folder of adapters, once the new one is complete.

    Returns:
        What was saved.

    Raises:
        UnsupportedCapabilityError: PEFT has put no adapter of this name into the model, or computes what it stores from
            whole tensors; or the folder is in an object store.
        CheckpointExistsError: There is something in the folder.
        ShardingError: It was called inside a step, or another rank did not call it.
        CheckpointError: Writing failed on some rank. The path is as it was.

    Example:
        In a LightningModule, after training::

            def on_train_end(self):
                save_adapter(self.model, "my-adapter")  # on every rank
    """
    model_shards = find_model(module, "save_adapter()")

    def choose_content(model: nn.Module, state: Mapping[str, ChunkedTensor]) -> FolderContent:
        config = _config_of(model, adapter_name)
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedCapabilityError(
                f"save_adapter() can't write the adapter {adapter_name!r}, a {type(config).__name__}: PEFT runs its "
                "prompt encoder to compute what it stores, and one rank can't do so alone over shards.\n"
                "Write, on all ranks:\n"
                "    with fsdp_core.gathered(self.model):\n"
                "        if self.trainer.is_global_zero:\n"
                "            self.model.save_pretrained(folder)"
            )
        peft: Any = import_module("peft")

        def select_adapter(full_state: dict[str, Tensor]) -> Mapping[str, Tensor]:
            with read_for_names(model):  # as of modules_to_save, whose values it takes from what is given
                adapter_state: Mapping[str, Tensor] = peft.get_peft_model_state_dict(
                    model, state_dict=full_state, adapter_name=adapter_name, save_embedding_layers=save_embedding_layers
                )
            return adapter_state

        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        views = views_of(shapes, select_adapter, f"the adapter {adapter_name!r}")
        if not views:
            raise UnsupportedCapabilityError(
                f"PEFT finds no parameter of the adapter {adapter_name!r} in this {type(model).__name__}.\n"
                "Write fsdp_core.full_state_dict(module), which holds the base model too."
            )
        return FolderContent(files={_WEIGHTS: list(views)}, views=views, configurations=[_config_writer(model, config)])

    stored = None if dtype is None else as_dtype(dtype)
    return write_folder(
        model_shards, folder, choose_content, dtype=stored, also=also, overwrite=overwrite, own_files=_OWN_FILES
    )


def _config_of(model: nn.Module, adapter_name: str) -> Any:
    configs: Mapping[str, Any] = getattr(model, "peft_config", {}) if is_adapted(model) else {}
    if adapter_name not in configs:
        hint = f"it has {', '.join(map(repr, configs))}" if configs else "PEFT has put none into it"
        raise UnsupportedCapabilityError(
            f"save_adapter() was asked for the adapter {adapter_name!r} of a {type(model).__name__}, and {hint}.\n"
            "Pass the model that get_peft_model() returned, such as self.model, and adapter_name= if it has a name; "
            "a model without adapters is written by fsdp_core.huggingface.save_pretrained()."
        )
    return configs[adapter_name]


def _config_writer(model: nn.Module, config: Any) -> Callable[[str], Any]:
    """Return a function that writes ``adapter_config.json``, as PEFT's own ``save_pretrained()`` would."""
    stored_config = copy.deepcopy(config)
    get_base: Any = getattr(model, "get_base_model", lambda: model)
    base = get_base()
    if stored_config.base_model_name_or_path is None:
        stored_config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    stored_config.inference_mode = True
    mapping = None
    if stored_config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return lambda folder: stored_config.save_pretrained(folder, auto_mapping_dict=mapping)
