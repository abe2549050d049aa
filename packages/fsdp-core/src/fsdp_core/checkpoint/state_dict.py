"""Loads a model's full state dict from any checkpoint, in one process and without Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.state_paths import find_part, split_path
from fsdp_core.checkpoint.left_out.restoring import with_base
from fsdp_core.checkpoint.loading import load, verify_tensors
from fsdp_core.checkpoint.storage.joined_folder import Paths, open_places
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath
from fsdp_core.checkpoint.storage.recognition import read_manifest
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError, MissingKeyError
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["load_state_dict"]


@retries_if_replaced("path")
def load_state_dict(
    path: Paths,
    key: str = "model",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    base: StrPath | None = None,
) -> dict[str, Tensor]:
    """Load a model's full state dict in one process, without Lightning, whichever strategy saved it.

    Args:
        path: A checkpoint folder of this format (a local path or an fsspec URL), or a local file that was saved with
            ``state_dict_type="full"``, which is read with ``torch.load(weights_only=True)``. In a file with the
            Trainer's layout, the model is the value of ``"state_dict"``. Or several paths, the places of a scattered
            save.
        key: The model's path in the state: ``"model"`` under the Trainer, and the user's own key under Fabric.
        device: The device of the returned tensors. Each is moved there as soon as it is read.
        dtype: The dtype for floating-point tensors; as saved if ``None``.
        verify: Whether to compare the checksums of the files that hold this model first, which reads them once more.
        base: The folder or file of the base, for a checkpoint that was saved with ``save_frozen=False``: what it leaves
            out is read from there, and compared with the digests that were saved.

    Returns:
        Tensors by FQN, for ``model.load_state_dict``. The names of a tied parameter share one tensor. A module's extra
        state (``get_extra_state``) is included as it was saved.

    Raises:
        CheckpointFormatError: There is no readable checkpoint, or it is damaged.
        MissingKeyError: It holds no model under that key; the message lists its keys.
        CheckpointMismatchError: It leaves tensors out, and no base is named, or another one.
    """
    folder = open_places(path)
    if folder.local and os.path.isfile(folder.root):
        part = _read_model_of_file(folder.root, key)
    else:
        state = load(path, verify=False)
        part = _find_model(state, key, folder, read_manifest(folder).kinds)
        if verify:
            verify_tensors(part)
        if base is not None:
            part = with_base(part, base)
    loaded_tensors: dict[Any, Tensor] = {}  # the names of a tied parameter share one

    def load_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {name: load_leaf(item) for name, item in leaf.items()}
        if isinstance(leaf, SavedTensor):
            identity: Any = leaf.key
        elif isinstance(leaf, Tensor):
            identity = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        else:
            return leaf
        if identity not in loaded_tensors:
            tensor = leaf.full() if isinstance(leaf, SavedTensor) else leaf
            is_converted = dtype is not None and tensor.is_floating_point()
            loaded_tensors[identity] = tensor.to(device=device, dtype=dtype if is_converted else tensor.dtype)
        return loaded_tensors[identity]

    return {str(name): load_leaf(leaf) for name, leaf in part.items()}


def _find_model(state: Mapping[str, Any], key: str, folder: Folder, part_types: Mapping[str, str]) -> Mapping[str, Any]:
    if key in state:
        part = state[key]
    else:
        try:
            part = find_part(state, key)
        except CheckpointValueError:
            part = None
    if isinstance(part, Mapping):
        return part
    model_paths = [path for path, part_type in part_types.items() if part_type == "model"]
    models = ", ".join(repr("/".join(split_path(path))) for path in model_paths) or "none"
    raise MissingKeyError(f"no model under {key!r} in {folder}. Models in it: {models}; pass one as key=.")


def _read_model_of_file(path: str, key: str) -> Mapping[str, Any]:
    try:
        # Mapped, so that a tensor is read when it is used.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointFormatError(
            f"{path} is a file that torch.load(weights_only=True) can't read: {error}. If it has another format, "
            "convert it first; this function runs no code from a checkpoint."
        ) from error
    if isinstance(content, Mapping):
        keys = [key]
        if key == "model":
            keys.append("state_dict")  # the Trainer's
        for name in keys:
            model = content.get(name)
            if isinstance(model, Mapping):
                return model
        description = ", ".join(map(repr, content))
    else:
        description = type(content).__name__
    raise MissingKeyError(f"no model under {key!r} in {path}. It holds: {description}; pass one as key=.")
