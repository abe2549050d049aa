"""Whether boxes cover a tensor exactly, against counting every element."""

from __future__ import annotations

import random

import pytest
import torch

from chunked_tensors import slices_of, split
from fsdp_core.state.coverage import Box, find_fault


def count(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    counted = torch.zeros(shape, dtype=torch.int32)
    for offsets, lengths in boxes:
        counted[slices_of(offsets, lengths)] += 1
    return counted


@pytest.mark.parametrize("seed", range(300))
def test_agrees_with_counting(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    boxes = split(shape, rng.randint(0, 12), rng)
    assert find_fault(shape, boxes) is None
    missing = boxes.pop(rng.randrange(len(boxes)))
    assert "nothing covers" in str(find_fault(shape, boxes))
    twice = [*boxes, missing, rng.choice([*boxes, missing])]
    assert "two chunks cover" in str(find_fault(shape, twice))
    # As many boxes, of which some may be there twice, others not at all, and one lies anywhere.
    begin = tuple(rng.randrange(size) for size in shape)
    anywhere = begin, tuple(rng.randint(1, size - at) for at, size in zip(begin, shape, strict=True))
    drawn = [*rng.choices([*boxes, missing], k=len(boxes)), anywhere]
    assert (count(shape, drawn) == 1).all().item() == (find_fault(shape, drawn) is None)


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((), [], "nothing covers []"),
        ((), [((), ()), ((), ())], "two chunks cover []"),
        ((4,), [((0,), (2,)), ((3,), (1,))], "nothing covers [2:3]"),
        ((4,), [((0,), (2,)), ((2,), (1,))], "nothing covers [3:4]"),
        ((4,), [((1,), (3,))], "nothing covers [0:1]"),
        ((2, 2), [((0, 0), (1, 2)), ((1, 1), (1, 1))], "nothing covers [1:2, 0:1]"),
        ((2, 2), [((0, 0), (2, 2)), ((1, 1), (1, 1))], "two chunks cover [1:2, 1:2]"),
        ((2,), [((1,), (2,))], "does not lie inside"),
        ((2,), [((-1,), (2,))], "does not lie inside"),
        ((2,), [((0,), (0,))], "does not lie inside"),
        ((0, 3), [((0, 0), (0, 3))], "does not lie inside"),
        ((2,), [((0, 0), (2, 1))], "does not have 1 dimensions"),
    ],
)
def test_says_what_is_wrong_and_where(shape: tuple[int, ...], boxes: list[Box], message: str) -> None:
    assert message in str(find_fault(shape, boxes))
