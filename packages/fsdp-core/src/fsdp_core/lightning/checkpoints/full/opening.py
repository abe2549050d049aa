"""Reads a sharded folder as the dict that a full file of the same run holds, for callers that expect a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint import SavedTensor, load, read_manifest
from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.checkpoint.left_out.stand_in import stand_in_for
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.checkpoint.storage.rereading import retries_if_replaced
from fsdp_core.lightning.checkpoints.full.layout import as_trainers_file, number_parameters

__all__ = ["MapLocation", "read_full_state"]

#: As in ``torch.load``.
MapLocation = torch.device | str | Mapping[str, str] | Callable[[Any, str], Any] | None


@retries_if_replaced("path")
def read_full_state(path: StrPath, map_location: MapLocation = None) -> dict[str, Any]:
    """Read all of a sharded folder in one process.

    Tensors are read one by one, so no more is in memory than the result.

    Args:
        path: A checkpoint of this format: a local path or an fsspec URL.
        map_location: Where to put the tensors, as in ``torch.load``; in the folder they are on the CPU.

    Returns:
        What ``torch.load`` returns for a full file of the same run. From a Trainer: ``state_dict``,
        ``optimizer_states`` (numbered, as a plain optimizer loads them), ``loops``, ``hyper_parameters`` and so on.
        From Fabric: the user's own keys. Names of a tied parameter share one tensor. For a tensor that the checkpoint
        leaves out there is one without values, which a module that was built from the base can load.

    Raises:
        CheckpointFormatError: There is no complete checkpoint that this version can read.
    """
    nest = load(path)
    contents = as_trainers_file(nest)
    if contents is None:  # saved by Fabric
        kinds = read_manifest(path).kinds
        contents = {k: number_parameters(v) if kinds.get(join_path(k)) == "optimizer" else v for k, v in nest.items()}
    return _TensorReader(map_location).read_nest(contents)  # type: ignore[no-any-return]


class _TensorReader:
    """Replaces handles on saved tensors by the tensors, each read once."""

    def __init__(self, map_location: MapLocation) -> None:
        self._map_location = map_location
        self._tensors: dict[str, Tensor] = {}

    def read_nest(self, value: Any) -> Any:
        """Return the same nest with tensors instead of handles."""
        if isinstance(value, dict):
            children = {k: self.read_nest(v) for k, v in value.items()}
            if type(value) is dict:
                return children
            value.update(children)  # in place, to keep an OrderedDict or a defaultdict; load() has just made it
            return value
        if isinstance(value, list):
            return [self.read_nest(v) for v in value]
        if type(value) is tuple:
            return tuple(self.read_nest(v) for v in value)
        if isinstance(value, SavedTensor):
            if value.key not in self._tensors:
                is_in_base = value.digest is not None
                self._tensors[value.key] = (
                    stand_in_for(value, self._move_tensor) if is_in_base else self._move_tensor(value.full())
                )
            return self._tensors[value.key]
        return self._move_tensor(value) if isinstance(value, Tensor) else value

    def _move_tensor(self, tensor: Tensor) -> Tensor:
        map_location = self._map_location
        if callable(map_location):
            storage = map_location(tensor.untyped_storage(), "cpu")
            if storage is None:
                return tensor
            moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            return moved.set_(storage, 0, tensor.shape, tensor.stride())
        if isinstance(map_location, Mapping):
            map_location = map_location.get("cpu")
        return tensor if map_location is None else tensor.to(map_location)
