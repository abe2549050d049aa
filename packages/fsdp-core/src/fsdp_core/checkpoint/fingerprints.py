"""A few elements of each of many tensors, which tell cheaply whether one was written to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["differing", "sample", "view_of_sample"]

#: A sample has one of this many elements of a tensor, within the bounds below. Reading an element that is in no cache
#: takes as long as copying a few hundred. For tensors of 5 MB, taking and comparing samples takes 1.1 to 1.3 % of the
#: time of the copy, and for larger ones less; most of it goes to the four operations on each tensor.
_ELEMENTS_PER_SAMPLED = 131_072
_MIN_SAMPLED = 16
_MAX_SAMPLED = 256

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sample(tensor: Tensor) -> Tensor:
    """A copy of elements that are spread evenly over a tensor, the first and the last included. Without gradients.

    Args:
        tensor: A tensor in host memory, of any strides.

    Returns:
        The elements, in one dimension.
    """
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # take() does not support float8
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
    """Find tensors that were written to, or that differ from their copies by bits (so that NaN equals itself).

    Args:
        samples: What :func:`sample` returned of each tensor.
        views: What :func:`view_of_sample` returned of the same tensors, or of their copies.

    Returns:
        The indices of the tensors of which a sampled element differs.

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
    for indices in indices_by_form.values():
        # All of one dtype and length at once: a comparison of so few elements costs as much as its preparation.
        are_all_equal = torch.equal(_bits([samples[i] for i in indices]), _bits([views[i] for i in indices]))
        if not are_all_equal:
            changed += [i for i in indices if not torch.equal(_bits([samples[i]]), _bits([views[i]]))]
    return sorted(changed)


@lru_cache(maxsize=1024)
def _lattice(elements: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shape and strides of a view of the sampled elements: those at even positions, then those at odd positions."""
    pairs = min(max(elements // _ELEMENTS_PER_SAMPLED, _MIN_SAMPLED), _MAX_SAMPLED) // 2
    if elements <= 2 * pairs:
        return (1, elements), (elements, 1)
    step, remainder = divmod(elements - 1, 2 * pairs - 1)
    # The second row begins later by the remainder, so that it ends at the last element.
    return (2, pairs), (step + remainder, 2 * step)


@lru_cache(maxsize=1024)
def _lattice_indices(elements: int) -> Tensor:
    (rows, columns), (row_stride, column_stride) = _lattice(elements)
    row_starts = torch.arange(rows) * row_stride
    return (row_starts[:, None] + torch.arange(columns) * column_stride).flatten()


def _bits(pieces: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([*pieces]).flatten().resolve_conj().resolve_neg()
    return joined.view(_BITS[joined.dtype.itemsize])
