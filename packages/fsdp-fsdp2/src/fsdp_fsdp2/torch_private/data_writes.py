"""Writes to shards by way of their ``.data``, which torch counts neither at a DTensor nor at the part that it holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.sharding import times_written

__all__ = ["count_data_writes", "follow_data_of_shards"]

#: What a tensor's ``data`` is without any of this.
_DATA: Any = Tensor.data

#: By sharded parameter: what shares memory, and the count of writes, with all that its ``data`` returns; and the
#: writes to others before. Empty as long as nobody reads the ``data`` of any.
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
    return 0 if shown is None else shown[1] + times_written(shown[0])


def _shown_data(tensor: DTensor) -> Tensor:
    """Replaces ``data`` of DTensors."""
    data: DTensor = _DATA.__get__(tensor)
    if not getattr(tensor, "_is_param", False):  # what torch has at parameters whose class is not Parameter
        return data
    shown: tuple[DTensor, int] | None = _shown_by_shard.get(tensor)
    if shown is None or not shown[0]._local_tensor.is_set_to(tensor._local_tensor):
        shown = _shown_by_shard[tensor] = data, _count(tensor)
    return shown[0].detach()
