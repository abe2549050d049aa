"""Whether boxes cover a tensor exactly, against counting every element."""

from __future__ import annotations

import random

import pytest
import torch

from fsdp_core.state.coverage import Box, find_fault


def count(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    counted = torch.zeros(shape, dtype=torch.int32)
    for offsets, lengths in boxes:
        counted[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    return counted


def split(shape: tuple[int, ...], cuts: int, rng: random.Random) -> list[Box]:
    """Cut a box in two, ``cuts`` times, anywhere."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        offsets, lengths = boxes.pop(rng.randrange(len(boxes)))
        axes = [axis for axis, length in enumerate(lengths) if length > 1]
        if not axes:
            boxes.append((offsets, lengths))
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, lengths[axis])
        low, high, rest = list(lengths), list(lengths), list(offsets)
        low[axis], high[axis], rest[axis] = at, lengths[axis] - at, offsets[axis] + at
        boxes += [(offsets, tuple(low)), (tuple(rest), tuple(high))]
    rng.shuffle(boxes)
    return boxes


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
    if boxes:
        # The same number of elements, but one box twice instead of another.
        wrong = [*boxes, boxes[0]]
        assert (count(shape, wrong) == 1).all().item() == (find_fault(shape, wrong) is None)


@pytest.mark.parametrize("seed", range(100))
def test_random_boxes_agree_with_counting(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    boxes: list[Box] = []
    for _ in range(rng.randint(0, 5)):
        offsets = tuple(rng.randrange(size) for size in shape)
        boxes.append((offsets, tuple(rng.randint(1, size - o) for o, size in zip(offsets, shape, strict=True))))
    assert (count(shape, boxes) == 1).all().item() == (find_fault(shape, boxes) is None)


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


def test_an_empty_tensor_needs_no_box() -> None:
    assert find_fault((0, 3), []) is None
