"""What ranks of one run tell each other, as bytes.

As in ``torch.distributed``, a message may hold anything that can be pickled, and only a rank of
the same run is listened to. Nothing else in this project unpickles.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(value: Any) -> bytes:
    """A message.

    Example:
        >>> from_bytes(to_bytes({"rank": 1}))
        {'rank': 1}
    """
    return pickle.dumps(value)


def from_bytes(message: bytes) -> Any:
    """What :func:`to_bytes` was given, by a rank of this very run."""
    return pickle.loads(message)
