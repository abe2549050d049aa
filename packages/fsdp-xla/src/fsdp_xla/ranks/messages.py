"""Serialization of messages between the ranks of one run.

As in ``torch.distributed``, a message may hold any picklable object, and is only accepted from ranks of the same run.
Nothing else in this project unpickles.

A tensor on the sender's XLA device arrives on the receiver's.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(value: Any) -> bytes:
    """Serialize a message.

    Example:
        >>> from_bytes(to_bytes({"rank": 1}))
        {'rank': 1}
    """
    message = io.BytesIO()
    _Pickler(message).dump(value)
    return message.getvalue()


def from_bytes(message: bytes) -> Any:
    """Deserialize a message that :func:`to_bytes` created in a rank of this run."""
    return pickle.loads(message)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors would otherwise be pickled with the sender's device."""
        if isinstance(value, Tensor) and value.device.type == "xla":
            return _on_device_here, (value.detach().cpu(),)
        return NotImplemented


def _on_device_here(tensor: Tensor) -> Tensor:
    return tensor.to("xla")
