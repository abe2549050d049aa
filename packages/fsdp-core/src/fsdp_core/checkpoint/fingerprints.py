"""A few elements of each of many tensors, which tell cheaply whether one was written to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

__all__ = ["differing", "sample", "views_of_sample"]

#: One of so many elements is looked at, but at least and at most so many of a tensor. An element that is in no cache
#: takes as long as copying a few hundred; so that all of them take less than a hundredth of the copy of a large tensor.
_ONE_OF = 65_536
_AT_LEAST, _AT_MOST = 16, 256

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sample(tensor: Tensor) -> Tensor:
    """A copy of elements that are spread evenly over a tensor, the first and the last included.

    Args:
        tensor: A tensor in host memory, of any strides.

    Returns:
        The elements, in one dimension.
    """
    return torch.take(_known_to_take(tensor), _places(tensor.numel()))


def views_of_sample(tensor: Tensor) -> list[Tensor]:
    """Views of the same elements of a contiguous tensor, in the same order. They may be kept while it is written to.

    Args:
        tensor: A contiguous tensor.
    """
    tensor, elements = _known_to_take(tensor), tensor.numel()
    step, count = _step(elements)
    views = [tensor.as_strided((count,), (step,))]
    if elements > count:
        views.append(tensor.as_strided((1,), (1,), tensor.storage_offset() + elements - 1))
    return views


def differing(samples: Sequence[Tensor], views: Sequence[Sequence[Tensor]]) -> list[int]:
    """Which tensors are not what they were, or not copied as they were. Bits are compared, so that NaN equals itself.

    Args:
        samples: What :func:`sample` returned of each tensor.
        views: What :func:`views_of_sample` returned of it, or of its copy.

    Returns:
        The indices of those of which an element differs.

    Example:
        >>> weight, bias = torch.tensor([1.0, float("nan")]), torch.zeros(3)
        >>> samples, views = zip(*((sample(one), views_of_sample(one)) for one in (weight, bias)))
        >>> differing(samples, views)
        []
        >>> _ = bias.data.neg_()  # from 0.0 to -0.0
        >>> differing(samples, views)
        [1]
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for index, one in enumerate(samples):
        kinds.setdefault(one.dtype, []).append(index)
    found: list[int] = []
    for alike in kinds.values():  # all at once: a comparison costs as much as its preparation
        if not torch.equal(_bits([samples[i] for i in alike]), _bits([*chain(*(views[i] for i in alike))])):
            found += [i for i in alike if not torch.equal(_bits([samples[i]]), _bits(views[i]))]
    return sorted(found)


def _known_to_take(tensor: Tensor) -> Tensor:
    """``take()`` knows none of float8."""
    return tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()


@lru_cache(maxsize=1024)
def _step(elements: int) -> tuple[int, int]:
    """How far apart elements are that are looked at, and how many they are without the last."""
    count = min(max(elements // _ONE_OF, _AT_LEAST), _AT_MOST)
    return (1, elements) if elements <= count else ((elements - 1) // (count - 1), count - 1)


@lru_cache(maxsize=1024)
def _places(elements: int) -> Tensor:
    step, count = _step(elements)
    places = torch.arange(count) * step
    return torch.cat([places, torch.tensor([elements - 1])]) if elements > count else places


def _bits(pieces: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([*pieces]).resolve_conj().resolve_neg()
    return joined.view(_BITS[joined.dtype.itemsize])
