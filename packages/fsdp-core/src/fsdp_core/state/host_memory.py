"""Memory of the host: the bytes of a tensor that lies there, and freed memory given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from torch import Tensor

__all__ = ["give_back", "memory_of"]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy and without numpy (which torch does not require)."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def give_back() -> None:
    """Let the system have what was freed among what is still used.

    glibc keeps it: a model that is sharded layer by layer, with a shard of each layer allocated before the layer is
    freed, would take its whole size of the host. Other C libraries are left alone. It takes a millisecond.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library, as on Windows
        return None
    return found
