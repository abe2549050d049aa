"""How the parameters that an optimizer holds map to the user's: one to one, or as runs of elements of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.state.boxes import boxes
from fsdp_core.state.chunks import Chunk, ChunkedTensor

__all__ = [
    "FlatRange",
    "Layout",
    "Part",
    "boxes",
    "bytes_held",
    "separation_hint",
    "stand_in",
    "whole_parts",
]


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Consecutive elements of a parameter, in C order, in a rank's 1-D tensor.

    Attributes:
        offset: The index of the first element in the rank's tensor.
        start: The index of the first element in the parameter.
        length: The number of elements; 0 if the rank holds nothing of the parameter.
        replica: The replica of the parameter that they belong to.
    """

    offset: int
    start: int
    length: int
    replica: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one of the user's parameters in a parameter that an optimizer holds.

    Attributes:
        name: The FQN of the user's parameter.
        shape: Its unsharded shape.
        range: The elements in the held parameter; ``None`` if that is the user's parameter itself, full or a DTensor.
        separated_by: The option with which optimizers hold each parameter separately, as users write it, such as
            ``"use_orig_params=True"``; for messages. Empty if there is none.
    """

    name: str
    shape: tuple[int, ...]
    range: FlatRange | None = None
    separated_by: str = ""

    def of(self, tensor: Tensor) -> Tensor | ChunkedTensor:
        """Return the user's part of ``tensor``, which is laid out as the held parameter, sharing memory with it."""
        if self.range is None:
            return tensor
        run = tensor.detach()[self.range.offset : self.range.offset + self.range.length]
        chunks = tuple(
            Chunk(offsets=offsets, data=run[position : position + prod(lengths)].view(lengths))
            for offsets, lengths, position in _boxes(self.shape, self.range.start, self.range.length)
        )
        return ChunkedTensor(shape=self.shape, dtype=tensor.dtype, chunks=chunks, replica=self.range.replica)

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of the parameter."""
        return self.range is not None and not self.range.length

    @property
    def holds_first_element(self) -> bool:
        """Whether this rank holds the parameter's first element, and so describes its per-parameter state."""
        return self.range is None or (self.range.length > 0 and self.range.start == 0 and self.range.replica == 0)


def separation_hint(part: Part) -> str:
    """Return the end of a sentence that says how users let an optimizer hold the parameter separately."""
    if part.separated_by:
        return f"write {part.separated_by}, with which each parameter is held separately."
    return "use a strategy that keeps parameters separate."


#: By each parameter that an optimizer may hold, the user's parameters in it.
Layout = Mapping[nn.Parameter, tuple[Part, ...]]


def whole_parts(named: Iterator[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, tuple[Part, ...]]:
    """Return the layout of parameters that the optimizer holds one to one."""
    return {p: (Part(name=name, shape=tuple(p.shape)),) for name, p in named}


def bytes_held(layout: Layout) -> int:
    """Return how many bytes of the user's parameters this rank holds, without padding.

    Example:
        >>> bytes_held(whole_parts(iter([("weight", nn.Parameter(torch.zeros(2, 3)))])))
        24
    """
    return sum(
        (part.range.length if part.range is not None else _local(parameter).numel()) * parameter.element_size()
        for parameter, parts in layout.items()
        for part in parts
    )


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def stand_in(shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    """Return a placeholder of a shape for a sharded parameter, which takes no memory.

    Its elements are NaN, so that values computed from it are not mistaken for results.

    Args:
        shape: The unsharded shape.
        like: The tensor whose dtype, device and ``requires_grad`` it gets.

    Example:
        >>> stand_in((2, 3), torch.ones(4)).shape
        torch.Size([2, 3])
    """
    element = torch.zeros((), dtype=like.dtype, device=like.device)
    if element.is_floating_point():
        element.fill_(torch.nan)
    return nn.Parameter(element.expand(shape), requires_grad=like.requires_grad)


@lru_cache(maxsize=4096)  # a save needs the boxes of a parameter once for it and once for each of its moments
def _boxes(shape: tuple[int, ...], start: int, length: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
    return tuple(boxes(shape, start, length))
