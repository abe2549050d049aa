"""Parts of sequences without ranks: what batches may be, loaders that yield parts, and helpers in one process."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fsdp_core
from fsdp_core import ProcessGroupRuntime
from fsdp_core.errors import ShardingError
from fsdp_core.lightning.loaders.position import position_of
from fsdp_core.lightning.loaders.split_batches import split_in_fabric
from fsdp_core.sharding import SequenceSplit, current_split, use_split
from fsdp_core.testing.refusals import assert_says, refusal

WHOLE = torch.arange(12).reshape(2, 6)


class Second(ProcessGroupRuntime):
    """The second of two context-parallel peers, as far as a split needs to know."""

    rank, world_size = 1, 2

    def along(self, *axes: Any) -> Any:
        return self

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj, obj]

    def all_reduce(self, tensor: Tensor, op: Any = "mean", group: Any = None) -> Tensor:
        return tensor * 2


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Example:
    x: Tensor
    name: str


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (WHOLE, lambda batch: [batch]),
        ([WHOLE, (WHOLE, 3)], lambda batch: [batch[0], batch[1][0]]),
        ({"x": WHOLE, "n": 3, "label": torch.zeros(2)}, lambda batch: [batch["x"]]),
        (UserDict(x=WHOLE), lambda batch: [batch["x"]]),
        (Pair(WHOLE, WHOLE), lambda batch: [batch.x, batch.y]),
        (Example(WHOLE, "a"), lambda batch: [batch.x]),
    ],
)
def test_batches_keep_their_structure(batch: Any, parts: Any) -> None:
    split = SequenceSplit(Second()).split(batch)
    assert type(split) is type(batch)
    for part in parts(split):
        torch.testing.assert_close(part, WHOLE[:, 3:])
    for whole in parts(batch):
        assert whole is WHOLE


def test_named_entries_along_their_own_dimensions() -> None:
    batch = {"x": WHOLE, "mask": torch.ones(2, 1, 6, 6), "whole": WHOLE}
    split = SequenceSplit(Second(), {"x": -1, "mask": 2}).split(batch)
    assert [tuple(one.shape) for one in split.values()] == [(2, 3), (2, 1, 3, 6), (2, 6)]
    again = SequenceSplit(Second(), {"x": 1})
    assert_says(refusal(ShardingError, lambda: again.split(again.split(batch))), "'x'", "already the part")


@pytest.mark.parametrize("moved", [torch.clone, lambda part: part.to(torch.float64), lambda part: part.to(torch.int16)])
def test_a_part_that_was_moved_is_not_split_again(moved: Any) -> None:
    """Fabric's loaders split on the CPU; the copy on another device has no mark."""
    split = SequenceSplit(Second())
    loader: Any = split_in_fabric(DataLoader(list(WHOLE), batch_size=1), split.split)  # type: ignore[arg-type]
    for batch in loader:
        assert_says(refusal(ShardingError, lambda b=batch: split.split(moved(b))), "already the part", "split_batch()")
    other = torch.arange(100, 106).reshape(2, 3)[:, :2]  # of another batch, which is as long as parts are
    split.split(WHOLE[:, :4])
    assert split.split(other).shape == (2, 1)
    nan = torch.full((2, 4), torch.nan)
    split.split(nan)
    assert_says(refusal(ShardingError, lambda: split.split(nan[:, :2].clone())), "already the part")


def test_a_loss_is_weighted_or_refused() -> None:
    split = SequenceSplit(Second())
    uneven = torch.tensor([[1, 2, 3, 4, -100, -100]])
    split.split(uneven)
    assert split.weight(torch.tensor(6.0), 2) == 6 * 2 / 4
    split.check_loss()
    assert_says(refusal(ShardingError, split.check_loss), "have 3, 1 that", "fsdp_core.token_mean")
    with torch.no_grad():  # of a validation step, after which the loss of training must be weighted too
        split.weight(torch.tensor(6.0), 2)
    assert_says(refusal(ShardingError, split.check_loss), "have 3, 1 that")
    split.split(WHOLE)
    split.check_loss()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_yields_parts_and_keeps_its_position(kind: Any) -> None:
    data: Any = [torch.arange(6) for _ in range(4)]
    loader = kind(data, batch_size=2)
    known = position_of(loader) is not None
    assert split_in_fabric(split_in_fabric(loader, lambda batch: batch[:, :1]), lambda batch: batch[:, :2]) is loader
    assert isinstance(loader, kind)
    assert [tuple(batch.shape) for batch in loader] == [(2, 2), (2, 2)]
    assert (position_of(loader) is not None) == known


def test_helpers_without_context_parallelism() -> None:
    use_split(None)
    assert current_split() is None
    assert fsdp_core.gather_sequence(WHOLE) is WHOLE
    assert fsdp_core.sequence_positions(3).tolist() == [0, 1, 2]
    assert fsdp_core.shift_labels(WHOLE)[:, -2:].tolist() == [[5, -100], [11, -100]]
    assert fsdp_core.token_mean(torch.tensor(6.0), 3) == 2


class Twice(Second):
    """Its peer has what it has."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([tensor, tensor])

    def reduce_scatter(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return 2 * tensor[1]


def test_double_precision_stays_double() -> None:
    """Of a mean over tokens, and of the gradient of what is gathered."""
    third = torch.tensor(1.0, dtype=torch.float64) / 3
    part = third.repeat(1, 2).requires_grad_()
    use_split(SequenceSplit(Twice()))
    try:
        weighted = fsdp_core.token_mean(third, torch.tensor(3))
        (fsdp_core.gather_sequence(part) * third).sum().backward()
    finally:
        use_split(None)
    assert weighted.item() == pytest.approx(1 / 9, rel=1e-15)
    assert part.grad is not None
    assert part.grad.tolist() == [[2 / 3, 2 / 3]]
