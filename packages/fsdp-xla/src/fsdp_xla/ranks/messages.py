"""What ranks of one run tell each other, as bytes.

As in ``torch.distributed``, a message may hold anything that can be pickled, and only a rank of
the same run is listened to. Nothing else in this project unpickles.

A tensor of the sender's XLA device arrives on the receiver's.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(value: Any) -> bytes:
    """A message.

    Example:
        >>> from_bytes(to_bytes({"rank": 1}))
        {'rank': 1}
    """
    message = io.BytesIO()
    _Pickler(message).dump(value)
    return message.getvalue()


def from_bytes(message: bytes) -> Any:
    """What :func:`to_bytes` was given, by a rank of this very run."""
    return pickle.loads(message)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Pickled as they are, tensors would name the sender's device."""
        if isinstance(value, Tensor) and value.device.type == "xla":
            return _on_device_here, (value.detach().cpu(),)
        return NotImplemented


def _on_device_here(tensor: Tensor) -> Tensor:
    return tensor.to("xla")
