"""Bits of a few elements of a tensor, which tell cheaply whether it was written to."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["ELEMENTS", "fingerprint"]

ELEMENTS = 256
"""How many elements of a tensor are looked at; all of them if it has no more."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """The bits of elements that are spread evenly over a tensor, the first and the last included.

    Two of them are compared by :func:`torch.equal`. As integers, NaN equals itself, and -0.0 is not 0.0. It costs some
    microseconds, whatever the size of the tensor.

    Args:
        tensor: A tensor in host memory, of any strides.

    Returns:
        Integers, of one dimension.

    Example:
        >>> before = fingerprint(weight := torch.tensor([1.0, float("nan")]))
        >>> torch.equal(fingerprint(weight), before)
        True
        >>> _ = weight.data.neg_()
        >>> torch.equal(fingerprint(weight), before)
        False
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_BITS[tensor.dtype.itemsize])
    if bits.is_contiguous():
        return bits.view(-1).index_select(0, _places(bits.numel()))
    return bits[torch.unravel_index(_places(bits.numel()), bits.shape)]


@lru_cache(maxsize=1024)
def _places(elements: int) -> Tensor:
    """Which elements of so many are looked at."""
    if elements <= ELEMENTS:
        return torch.arange(elements)
    return torch.arange(ELEMENTS) * (elements - 1) // (ELEMENTS - 1)
