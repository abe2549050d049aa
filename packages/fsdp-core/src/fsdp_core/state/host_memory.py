"""Host memory: the bytes of a CPU tensor, and freed memory returned to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from torch import Tensor

__all__ = ["give_back", "memory_of"]


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy and without numpy (which torch does not require)."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def give_back() -> None:
    """Return freed memory between live allocations to the operating system.

    glibc keeps it: if a model is sharded layer by layer, and the shard of each layer is allocated before the layer is
    freed, the process keeps the model's full size in host memory. Does nothing with other C libraries. Takes about a
    millisecond.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library, as on Windows
        return None
    return malloc_trim
