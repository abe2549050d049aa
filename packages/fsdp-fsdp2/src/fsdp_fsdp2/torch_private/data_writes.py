"""Writes to the ``.data`` of shards, which torch counts neither at the DTensor nor at its local tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.sharding import times_written

__all__ = ["count_data_writes", "follow_data_of_shards"]

#: torch's own property.
_DATA: Any = Tensor.data

#: By sharded parameter whose ``data`` was read: a tensor that shares its memory and its count of writes with all that
#: ``data`` has returned since the shard has this memory, and the number of writes before that.
_shown_by_shard: WeakIdKeyDictionary = WeakIdKeyDictionary()


def follow_data_of_shards() -> None:
    """Count, from now on, writes to sharded parameters by way of their ``data``. Idempotent."""
    dtensor_class: Any = DTensor
    if "data" not in vars(DTensor):
        dtensor_class.data = property(_shown_data, _DATA.__set__)


def count_data_writes(group: Any) -> int:
    """How often the shards of a unit were written to by way of their ``data``.

    Args:
        group: The unit's parameter group.
    """
    return sum(_count(parameter.sharded_param) for parameter in group.fsdp_params) if _shown_by_shard else 0


def _count(shard: Tensor) -> int:
    shown: tuple[Tensor, int] | None = _shown_by_shard.get(shard)
    if shown is None:
        return 0
    data, earlier_writes = shown
    return earlier_writes + times_written(data)


def _shown_data(tensor: DTensor) -> Tensor:
    """Replaces ``data`` of DTensors: for parameters, all that it returns shares one count of writes."""
    data: DTensor = _DATA.__get__(tensor)
    if not getattr(tensor, "_is_param", False):  # torch sets it for parameters whose class is not Parameter
        return data
    shown: tuple[DTensor, int] | None = _shown_by_shard.get(tensor)
    if shown is None or not shown[0]._local_tensor.is_set_to(tensor._local_tensor):
        shown = _shown_by_shard[tensor] = data, _count(tensor)
    return shown[0].detach()
