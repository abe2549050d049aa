"""Digests of tensors that do not depend on how they are sharded: the sums of ranks' boxes are that of the whole.

A digest is a weighted sum of a tensor's words modulo 2**64, where the weight of a word follows from its index. So each
rank adds up its own boxes, and the sums of all ranks are added. docs/checkpoint-format.md specifies it.

A change of one word always changes the digest, since all weights are odd. It guards against accidents, not forgery.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fsdp_core.state.chunks import Chunk, ChunkedTensor

__all__ = ["box_sum", "digest_of", "digest_text", "is_digest", "local_sums"]

_BITS = 64
_MODULUS = 2**_BITS
#: Words in which an element is read, by its size: elements of eight bytes are two words.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
#: Weights of indices come from tables of this length.
_TABLE = 2**16
#: Words that are added up at once: such that they stay in a core's cache, or keep an accelerator busy.
_HOST_BLOCK = 2**16
_DEVICE_BLOCK = 2**24
#: A row of the two-dimensional form in which a box is added up has at least this many words, if there are as many.
_MIN_ROW = 64


def box_sum(data: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the weighted sum of the words of a box, a 0-dim int64 tensor on its device. Sums wrap around.

    Args:
        data: The elements of the box, of any dtype that a checkpoint can hold.
        offsets: Where the box begins in its tensor.

    Example:
        >>> whole = torch.arange(12.0).reshape(4, 3)
        >>> top, bottom = box_sum(whole[:1], (0, 0)), box_sum(whole[1:], (1, 0))
        >>> bool(top + bottom == box_sum(whole, (0, 0)))
        True
    """
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
        offsets = (*offsets, 0)
    words = data.detach().contiguous()
    if words.dtype.itemsize == 8:
        words = words.unsqueeze(-1).view(torch.int32)  # the lower half of each element comes first
        offsets = (*offsets, 0)
    else:
        words = words.view(_WORDS[words.dtype.itemsize])
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=words.device)
    return _sum_of_words(words, tuple(offsets))


def _sum_of_words(words: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The weighted sum of a contiguous box of words: of sums of rows, each in two dimensions."""
    lengths = tuple(words.shape)
    device = words.device
    block_words = _HOST_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    split = len(lengths)  # dimensions from here on form a row
    while split and prod(lengths[split:]) < _MIN_ROW:
        split -= 1
    row_words = prod(lengths[split:])
    if row_words > block_words and lengths[split] > 1:
        return _sum_of_slices(words, offsets, split, max(block_words // (row_words // lengths[split]), 1))
    weights = [
        _weights(dim, offset, length).to(device)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True))
    ]
    row_weights = _outer(weights[split:], device)
    rows = words.reshape(-1, row_words)
    rows_at_once = max(block_words // row_words, 1)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(rows), rows_at_once):
        block = rows[start : start + rows_at_once]
        sums = block.to(torch.int64).mul_(row_weights).sum(1)
        total += sums.mul_(_weights_of_rows(weights[:split], lengths[:split], start, len(block), device)).sum()
    return total


def _sum_of_slices(words: Tensor, offsets: tuple[int, ...], dim: int, step: int) -> Tensor:
    """The sum of a box whose rows are very long, in slices along the first dimension of the rows."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[dim], step):
        length = min(step, words.shape[dim] - start)
        begin = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        total += _sum_of_words(words.narrow(dim, start, length).contiguous(), begin)
    return total


def _weights_of_rows(
    weights: Sequence[Tensor], lengths: Sequence[int], start: int, count: int, device: torch.device
) -> Tensor:
    """The products of the weights of the leading dimensions, for some rows in row-major order."""
    if len(weights) == 1:
        return weights[0][start : start + count]
    product = torch.ones(count, dtype=torch.int64, device=device)
    index = torch.arange(start, start + count, device=device)
    for weight, length in zip(reversed(weights), reversed(lengths), strict=True):
        product *= weight[index % length]
        index = index // length
    return product


def _outer(weights: Sequence[Tensor], device: torch.device) -> Tensor:
    product = torch.ones(1, dtype=torch.int64, device=device)
    for weight in weights:
        product = (product[:, None] * weight).flatten()
    return product


@lru_cache(maxsize=64)  # a model repeats its shapes
def _weights(dim: int, offset: int, length: int) -> Tensor:
    """The weights of indices along a dimension: that of the lower 16 bits of an index times that of the others."""
    pieces = []
    start, end = offset, offset + length
    while start < end:
        high, low = divmod(start, _TABLE)
        count = min(end - start, _TABLE - low)
        weight_of_high = int(_mix(torch.tensor((dim << 48) + (1 << 40) + high)))
        pieces.append(_table(dim)[low : low + count] * weight_of_high)
        start += count
    return torch.cat(pieces)


@lru_cache(maxsize=64)
def _table(dim: int) -> Tensor:
    with torch.inference_mode(False):  # it is kept
        return _mix(torch.arange(_TABLE, dtype=torch.int64) + (dim << 48))


def _mix(number: Tensor) -> Tensor:
    """The generator splitmix64 after its state has had a value, made odd."""
    state = (number + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, which torch's int64 does with the sign."""
    return (value >> bits) & ((1 << (_BITS - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - _MODULUS if constant >= _MODULUS // 2 else constant


def local_sums(tensors: Iterable[ChunkedTensor]) -> list[int]:
    """Return the sum of this rank's boxes for each tensor, as signed 64-bit numbers; 0 for what is not copy 0.

    Args:
        tensors: This rank's parts. Of several copies of a tensor, only the first is counted.
    """
    sums = [_sum_of_boxes(tensor.chunks if tensor.replica == 0 else ()) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(index)
    numbers = [0] * len(sums)
    for indices in by_device.values():  # one copy from each device
        for index, number in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            numbers[index] = int(number)
    return numbers


def _sum_of_boxes(chunks: Sequence[Chunk]) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for chunk in chunks:
        data = chunk.data
        if not isinstance(data, Tensor):
            data = data.read((0,) * len(data.shape), tuple(data.shape))
        partial = box_sum(data, chunk.offsets)
        total = partial + total.to(partial.device)
    return total


def digest_text(total: int) -> str:
    """Return the text of a digest: ``sum64:`` and 16 hexadecimal digits.

    Args:
        total: The sum over all ranks, modulo 2**64.

    Example:
        >>> digest_text(-1)
        'sum64:ffffffffffffffff'
    """
    return f"sum64:{total % _MODULUS:016x}"


def is_digest(text: str) -> bool:
    """Whether a text is a digest, as :func:`digest_text` returns it."""
    return re.fullmatch("sum64:[0-9a-f]{16}", text) is not None


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a whole tensor.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> digest_of(weight) == digest_of(weight.clone()), digest_of(weight) == digest_of(-weight)
        (True, False)
    """
    return digest_text(int(box_sum(tensor, (0,) * tensor.ndim)))
