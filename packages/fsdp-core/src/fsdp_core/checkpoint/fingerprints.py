"""A few elements of each of many tensors, which tell cheaply whether one was written to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["differing", "sample", "view_of_sample"]

#: One of so many elements is looked at, but at least and at most so many of a tensor. An element that is in no cache
#: takes as long as copying a few hundred. For tensors of 5 MB, all of it takes 1.1 to 1.3 % of the time of the copy,
#: most of it for four operations on each tensor; for larger ones less.
_ONE_OF = 131_072
_AT_LEAST, _AT_MOST = 16, 256

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sample(tensor: Tensor) -> Tensor:
    """A copy of elements that are spread evenly over a tensor, the first and the last included. Without gradients.

    Args:
        tensor: A tensor in host memory, of any strides.

    Returns:
        The elements, in one dimension.
    """
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # take() knows none of float8
    return torch.take(tensor, _lattice_indices(tensor.numel()))


def view_of_sample(tensor: Tensor) -> Tensor:
    """A view of the same elements of a contiguous tensor, in the same order. It may be kept while that is written to.

    Args:
        tensor: A contiguous tensor.

    Returns:
        The elements, in two dimensions.
    """
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return bits.as_strided(*_lattice(tensor.numel()))


def differing(samples: Sequence[Tensor], views: Sequence[Tensor]) -> list[int]:
    """Which tensors are not what they were, or not copied as they were. Bits are compared, so that NaN equals itself.

    Args:
        samples: What :func:`sample` returned of each tensor.
        views: What :func:`view_of_sample` returned of it, or of its copy.

    Returns:
        The indices of those of which an element differs.

    Example:
        >>> weight, bias = torch.tensor([1.0, float("nan")]), torch.zeros(3)
        >>> samples = [sample(weight), sample(bias)]
        >>> views = [view_of_sample(weight), view_of_sample(bias)]
        >>> differing(samples, views)
        []
        >>> _ = bias.data.neg_()  # from 0.0 to -0.0
        >>> differing(samples, views)
        [1]
    """
    indices_by_form: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, sampled in enumerate(samples):
        indices_by_form.setdefault((sampled.dtype, len(sampled)), []).append(index)
    changed: list[int] = []
    for indices in indices_by_form.values():  # all at once: a comparison costs as much as its preparation
        if not torch.equal(_bits([samples[i] for i in indices]), _bits([views[i] for i in indices])):
            changed += [i for i in indices if not torch.equal(_bits([samples[i]]), _bits([views[i]]))]
    return sorted(changed)


@lru_cache(maxsize=1024)
def _lattice(elements: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shape and the strides of the elements that are looked at: every second one from the first, and the others."""
    pairs = min(max(elements // _ONE_OF, _AT_LEAST), _AT_MOST) // 2
    if elements <= 2 * pairs:
        return (1, elements), (elements, 1)
    step, remainder = divmod(elements - 1, 2 * pairs - 1)
    # the second row begins later by what is left over, so that it ends at the last element
    return (2, pairs), (step + remainder, 2 * step)


@lru_cache(maxsize=1024)
def _lattice_indices(elements: int) -> Tensor:
    (rows, columns), (row_stride, column_stride) = _lattice(elements)
    row_starts = torch.arange(rows) * row_stride
    return (row_starts[:, None] + torch.arange(columns) * column_stride).flatten()


def _bits(pieces: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([*pieces]).flatten().resolve_conj().resolve_neg()
    return joined.view(_BITS[joined.dtype.itemsize])
