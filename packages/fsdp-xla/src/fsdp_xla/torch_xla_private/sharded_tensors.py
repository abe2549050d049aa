"""Tensors that are sharded over a mesh, through torch_xla's compiled module. Tested with torch_xla 2.9.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from fsdp_xla.torch_xla_private.devices import compiled

__all__ = [
    "from_shards",
    "is_marked",
    "local_boxes",
    "local_shards",
    "mark",
    "mark_as",
    "sharding_of",
    "used_without_spmd",
]

# torch_xla.distributed.spmd can mark tensors, but does not expose their shards.
_XLAC: Any = compiled


def used_without_spmd() -> bool:
    """Whether this process has tensors on single devices, which SPMD would have to replicate. Not public."""
    return bool(_XLAC._xla_get_spmd_config_is_locked()) and not xr.is_spmd()


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor has a sharding. ``mark_sharding`` raises for a tensor with a different one."""
    return bool(_XLAC._get_xla_sharding_spec(tensor))


def sharding_of(tensor: Tensor) -> Any:
    """A tensor's sharding, for :func:`mark` and :func:`from_shards`; ``None`` if it has none."""
    return _XLAC._get_xla_op_sharding(tensor)


def mark(tensor: Tensor, sharding: Any) -> None:
    """Shard a tensor like another. ``mark_sharding`` requires a mesh and a spec, which tensors don't keep."""
    _XLAC._xla_mark_sharding(tensor, sharding)


def mark_as(tensor: Tensor, mesh: Any, spec: tuple[Any, ...]) -> None:
    """Shard a tensor over a mesh: by dimension, the axis or axes over which it is sharded, or ``None``.

    torch_xla's ``mark_sharding`` searches the disk at each call for two packages that are seldom installed, and wraps
    the tensor, which is not needed here: a fifth of the time of a step that marks a hundred tensors.
    """
    mark(tensor, mesh.get_op_sharding(spec))


def local_shards(tensor: Tensor) -> list[Tensor]:
    """Copies of a marked tensor's shards on the host, one per device, padded to equal shapes."""
    return [shard for shard, _ in _XLAC._get_local_shards([tensor])[0]]


def local_boxes(tensor: Tensor) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The part of a marked tensor on each device: its replica index, its offsets, and its lengths without padding.

    Lengths of 0 or less mean that the part is all padding.
    """
    xm.wait_device_ops()  # outputs of a running step have no shards to read yet
    boxes = []
    for replica, index in _XLAC._get_local_shard_replica_and_indices([tensor])[0]:
        if index is Ellipsis:
            boxes.append((int(replica), (0,) * tensor.ndim, tuple(tensor.shape)))
        else:
            offsets = tuple(part.start for part in index)
            boxes.append((int(replica), offsets, tuple(part.stop - part.start for part in index)))
    return boxes


def from_shards(shards: Sequence[Tensor], sharding: Any, shape: Sequence[int]) -> Tensor:
    """Create a tensor on the devices from shards on the host, without a full copy on any device."""
    tensor = _XLAC._global_tensor_from_cpu_shards(list(shards), sharding, list(shape))
    assert isinstance(tensor, torch.Tensor)
    return tensor
