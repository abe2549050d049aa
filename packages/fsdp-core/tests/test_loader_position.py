"""Samplers and loaders whose position in an epoch can be saved and divided, in one process."""

from __future__ import annotations

from itertools import count, product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

from adapter_clauses.loader_runs import in_turns
from fsdp_core.lightning.loaders.position import (
    POSITION,
    ResumableSampler,
    copy_without_position,
    position_of,
    sampler_of,
    track_position,
)

LOADERS = [DataLoader, StatefulDataLoader]


def torchs(size: int, world_size: int, rank: int, epoch: int = 0, **kwargs: Any) -> Any:
    sampler: Any = DistributedSampler(range(size), world_size, rank, **kwargs)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return sampler


def followed(kind: Any, size: int, world_size: int, rank: int, batch: int, epoch: int = 0, **kwargs: Any) -> Any:
    """A rank's loader, as Lightning prepares it."""
    options = {key: kwargs.pop(key) for key in ("num_workers", "drop_last") if key in kwargs}
    order = torchs(size, world_size, rank, epoch, **kwargs)
    loader = kind(range(size), batch_size=batch, sampler=order, collate_fn=list, **options)
    assert track_position(loader, order) is position_of(loader) is not None
    return loader


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "world_size"), [(1, 1), (8, 2), (9, 4), (2, 3), (1, 4), (24, 5)])
def test_whole_epochs_are_those_of_torchs_sampler(size: int, world_size: int, drop_last: bool, shuffle: bool) -> None:
    for rank, epoch in product(range(world_size), (0, 3)):
        kwargs: dict[str, Any] = {"shuffle": shuffle, "seed": 7, "drop_last": drop_last}
        ours: Any = ResumableSampler(range(size), world_size, rank, **kwargs)
        ours.set_epoch(epoch)
        theirs = torchs(size, world_size, rank, epoch, **kwargs)
        assert list(ours) == list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [24, 25, 7])
@pytest.mark.parametrize(("saved_on", "loaded_on"), list(product([1, 2, 3, 4], repeat=2)))
def test_what_is_left_is_divided(kind: Any, size: int, saved_on: int, loaded_on: int) -> None:
    """Each sample comes once, whenever an epoch is interrupted; fewer than a turn of them come once more at its end."""
    order = list(torchs(size, 1, 0, epoch=2))
    for batch, other in ((1, 2), (3, 2)):
        first = [followed(kind, size, saved_on, rank, batch, epoch=2) for rank in range(saved_on)]
        steps = len(first[0])
        iterators = [iter(loader) for loader in first]
        for step in range(steps + 1):
            states = [loader.state_dict() for loader in first]
            assert all(state == states[0] for state in states)
            seen = min(step * batch * saved_on, size)
            assert states[0][POSITION]["seen"] == seen
            second = [followed(kind, size, loaded_on, rank, other, epoch=2) for rank in range(loaded_on)]
            for loader in second:
                loader.load_state_dict(states[0])
            left = [list(loader) for loader in second]
            assert in_turns(left) == order[seen:] + (order * 4)[: -(size - seen) % loaded_on]
            position = position_of(second[0])
            assert position is not None
            assert len(left[0]) == len(second[0]) - position.batches_after_samples(seen, float("inf"))
            for rank, loader in enumerate(second):
                sampler_of(loader).set_epoch(3)
                assert [index for indices in loader for index in indices] == list(torchs(size, loaded_on, rank, 3))
            if step < steps:
                for iterator in iterators:
                    next(iterator)


@pytest.mark.parametrize("kind", LOADERS)
def test_smaller_batches_and_uneven_turns_left_out(kind: Any) -> None:
    order = list(torchs(20, 1, 0))
    loader = followed(kind, 20, 2, 1, 3, drop_last=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state[POSITION]["seen"] == 6
    others = [followed(kind, 20, 3, rank, 2, drop_last=True) for rank in range(3)]
    for other in others:
        other.load_state_dict(state)
    assert in_turns([list(other) for other in others]) == order[6:18]
    uneven = [ResumableSampler(range(22), 3, rank, shuffle=False, drop_last=True) for rank in range(3)]
    for sampler in uneven:
        sampler.resume(0, 6)
    assert [list(sampler) for sampler in uneven] == [[6, 9, 12, 15, 18], [7, 10, 13, 16, 19], [8, 11, 14, 17, 20]]


@pytest.mark.parametrize("kind", LOADERS)
def test_iterators_that_nobody_uses_take_nothing(kind: Any) -> None:
    loader = followed(kind, 8, 2, 0, 2)
    used = iter(loader)
    next(used)
    state = loader.state_dict()
    loader.load_state_dict(state)
    iter(loader)
    iter(loader)
    assert loader.state_dict() == state
    assert list(loader) == [list(torchs(8, 2, 0))[2:]]
    assert [index for batch in loader for index in batch] == list(torchs(8, 2, 0))


@pytest.mark.parametrize("kind", LOADERS)
def test_a_copy_for_validation_takes_nothing(kind: Any) -> None:
    """One loader may serve both: its position is that of training, and validation sees whole epochs."""
    loader = followed(kind, 8, 2, 0, 2)
    loader.load_state_dict({POSITION: {**loader.state_dict()[POSITION], "seen": 4}})
    used = iter(loader)
    other = copy_without_position(loader)
    assert [index for batch in other for index in batch] == list(torchs(8, 2, 0))
    assert next(used) == list(torchs(8, 2, 0))[2:]
    validated = iter(copy_without_position(loader))
    next(validated)
    assert loader.state_dict()[POSITION]["seen"] == 8
    assert position_of(other) is None


def test_a_second_iteration_in_an_epoch_is_whole() -> None:
    loader = followed(DataLoader, 8, 2, 0, 2)
    loader.load_state_dict({POSITION: {**loader.state_dict()[POSITION], "seen": 4}})
    assert len(list(loader)) == 1
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()[POSITION]["seen"] == 4


def test_another_epoch_is_not_interrupted() -> None:
    """Not even by the state of another dataset."""
    loader, other = followed(DataLoader, 8, 2, 0, 2), followed(DataLoader, 9, 2, 0, 2, epoch=1)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert [index for batch in other for index in batch] == list(torchs(9, 2, 0, 1))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return count()


class WithState(list[int]):
    def state_dict(self) -> dict[str, int]:
        return {}


class Reversed(DistributedSampler[int]):
    pass


class Twice(DataLoader[int]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield from super().__iter__()


class Pairs(BatchSampler):
    pass


def samples() -> Any:
    return list(range(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda order: DataLoader(Endless()),
        lambda order: StatefulDataLoader(WithState([1, 2]), sampler=order),
        lambda order: DataLoader(samples(), sampler=SequentialSampler(samples())),
        lambda order: DataLoader(samples(), sampler=Reversed(samples(), 2, 0)),
        lambda order: DataLoader(samples(), batch_sampler=Pairs(order, 2, False)),
        lambda order: Twice(samples(), sampler=order),
        lambda order: DataLoader(samples(), sampler=order, num_workers=1, in_order=False),
    ],
    ids=["iterable", "dataset with state", "no ranks", "own sampler", "own batches", "own iteration", "out of order"],
)
def test_loaders_whose_position_is_not_followed(make: Any) -> None:
    order: Any = DistributedSampler(samples(), 2, 0)
    loader = make(order)
    assert track_position(loader, sampler_of(loader)) is None
    assert position_of(loader) is None


def test_loaders_whose_position_is_followed() -> None:
    for kind in (DistributedSampler, StatefulDistributedSampler):
        order: Any = kind(samples(), 2, 1, shuffle=False)
        for loader in (
            DataLoader(samples(), sampler=order, batch_size=None),
            DataLoader(samples(), batch_sampler=BatchSampler(order, 2, False)),
            StatefulDataLoader(samples(), sampler=order),
        ):
            position = track_position(loader, sampler_of(loader))
            assert position is not None
            assert track_position(loader, sampler_of(loader)) is position
            assert torch.tensor([torch.as_tensor(item).tolist() for item in loader]).flatten().tolist() == [1, 3]
