"""Counts in-place operations on ``parameter.data`` of sharded parameters, such as ``parameter.data.mul_(0.9)``.

torch counts writes to a tensor in ``_version``, by which a unit is known to need another gather. But ``data`` returns a
new tensor with a count of its own: such a write raises the count of neither the DTensor nor its local tensor. So
``DTensor.data`` is replaced by a property that returns tensors which share one count for each parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.sharding import times_written

__all__ = ["count_data_writes", "follow_data_of_shards"]

#: torch's own property.
_DATA: Any = Tensor.data


class _ReturnedData(NamedTuple):
    """What ``data`` of a sharded parameter has returned.

    Attributes:
        tensor: A tensor that shares its memory and its count of writes with all that ``data`` has returned since the
            shard has had this memory.
        earlier_writes: The number of writes before that.
    """

    tensor: DTensor
    earlier_writes: int


#: By sharded parameter whose ``data`` was read, its :class:`_ReturnedData`.
_data_by_shard: WeakIdKeyDictionary = WeakIdKeyDictionary()


def follow_data_of_shards() -> None:
    """Count, from now on, writes to sharded parameters by way of their ``data``. Idempotent."""
    dtensor_class: Any = DTensor
    if "data" not in vars(DTensor):
        dtensor_class.data = property(_get_counted_data, _DATA.__set__)


def count_data_writes(group: Any) -> int:
    """How often the shards of a unit were written to by way of their ``data``.

    Args:
        group: The unit's parameter group.
    """
    # where no data was read, which is usual, no shard is looked up
    return sum(_count_writes(parameter.sharded_param) for parameter in group.fsdp_params) if _data_by_shard else 0


def _count_writes(shard: Tensor) -> int:
    returned: _ReturnedData | None = _data_by_shard.get(shard)
    return 0 if returned is None else returned.earlier_writes + times_written(returned.tensor)


def _get_counted_data(tensor: DTensor) -> Tensor:
    """Replaces the getter of ``data`` of DTensors: for parameters, all that it returns shares one count of writes."""
    data: DTensor = _DATA.__get__(tensor)
    is_parameter = getattr(tensor, "_is_param", False)  # torch sets this for parameters whose class is not Parameter
    if not is_parameter:
        return data
    returned: _ReturnedData | None = _data_by_shard.get(tensor)
    if returned is None or not returned.tensor._local_tensor.is_set_to(tensor._local_tensor):
        returned = _data_by_shard[tensor] = _ReturnedData(data, earlier_writes=_count_writes(tensor))
    return returned.tensor.detach()
