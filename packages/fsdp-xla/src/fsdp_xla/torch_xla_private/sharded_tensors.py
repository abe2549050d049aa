"""What torch_xla's compiled half tells of tensors that are sharded over a mesh. Checked on torch_xla 2.9.0."""

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

# torch_xla.distributed.spmd can mark tensors, and tell nothing of their shards.
_XLAC: Any = compiled


def used_without_spmd() -> bool:
    """Whether this process has tensors on single devices, which SPMD would have to replicate. No public name tells."""
    return bool(_XLAC._xla_get_spmd_config_is_locked()) and not xr.is_spmd()


def is_marked(tensor: Tensor) -> bool:
    """Whether it is settled how a tensor is sharded. ``mark_sharding`` raises on one that is marked otherwise."""
    return bool(_XLAC._get_xla_sharding_spec(tensor))


def sharding_of(tensor: Tensor) -> Any:
    """How a tensor is sharded, for :func:`mark` and :func:`from_shards`; ``None`` if that is not settled."""
    return _XLAC._get_xla_op_sharding(tensor)


def mark(tensor: Tensor, sharding: Any) -> None:
    """Shard a tensor as another. ``mark_sharding`` would ask for a mesh and a spec, which a tensor doesn't keep."""
    _XLAC._xla_mark_sharding(tensor, sharding)


def mark_as(tensor: Tensor, mesh: Any, spec: tuple[Any, ...]) -> None:
    """Shard a tensor over a mesh: by dimension, the axis or axes that it is cut along, or ``None``.

    torch_xla's ``mark_sharding`` looks on the disk each time for two packages that are seldom there, and wraps the
    tensor for a caller that here does without: a fifth of the time of a step that marks a hundred.
    """
    mark(tensor, mesh.get_op_sharding(spec))


def local_shards(tensor: Tensor) -> list[Tensor]:
    """Copies of a marked tensor's shards on the host, one per device, padded to equal shapes."""
    return [shard for shard, _ in _XLAC._get_local_shards([tensor])[0]]


def local_boxes(tensor: Tensor) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Which part of a marked tensor each device holds: which copy of it, its offsets, and its lengths without padding.

    Lengths of 0 or less say that it is all padding.
    """
    xm.wait_device_ops()  # what a step still gives has no shards to look at
    boxes = []
    for replica, index in _XLAC._get_local_shard_replica_and_indices([tensor])[0]:
        if index is Ellipsis:
            boxes.append((int(replica), (0,) * tensor.ndim, tuple(tensor.shape)))
        else:
            offsets = tuple(part.start for part in index)
            boxes.append((int(replica), offsets, tuple(part.stop - part.start for part in index)))
    return boxes


def from_shards(shards: Sequence[Tensor], sharding: Any, shape: Sequence[int]) -> Tensor:
    """A tensor on the devices of shards on the host, which is never whole on any of them."""
    tensor = _XLAC._global_tensor_from_cpu_shards(list(shards), sharding, list(shape))
    assert isinstance(tensor, torch.Tensor)
    return tensor
