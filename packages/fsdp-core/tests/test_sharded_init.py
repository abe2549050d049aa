"""Parameters of which ranks keep parts: what may still be done to them, on one rank that stands for several."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from checkpoint_ranks import on_threads
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.sharded_init import (
    KeptPart,
    check_same_parts,
    detach_part,
    is_part,
    keep_parts,
    kept_as_built,
)
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.testing.refusals import assert_says, refusal


class Alone(ProcessGroupRuntime):
    """One of several ranks, of which the others are told of."""

    def __init__(self, rank: int, ranks: int = 3, others: Callable[[Any], Any] = lambda own: own) -> None:
        super().__init__()
        self.rank, self.world_size, self.others = rank, ranks, others

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj, *(self.others(obj) for _ in range(self.world_size - 1))]

    def total(self, numbers: Sequence[int]) -> list[int]:
        return [1] * len(numbers)  # another rank asks all to look closer


def built(rank: int, *, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(5, 4, dtype=dtype)
    with kept_as_built(Alone(rank)):
        return fsdp_core.wrap(layer)


def whole(change: Callable[[nn.Linear], Any] = lambda layer: None) -> Tensor:
    """The weight as three ranks have it together, after each has done the same to it."""
    parts = []
    for rank in range(3):
        layer = built(rank)
        change(layer)
        kept = detach_part(layer.weight)
        assert kept is not None
        assert type(layer.weight) is nn.Parameter
        parts.append(kept.part)
    return torch.cat(parts).view(kept.shape)


def plain(change: Callable[[nn.Linear], Any] = lambda layer: None) -> Tensor:
    torch.manual_seed(1)
    layer = nn.Linear(5, 4)
    change(layer)
    return layer.weight.detach()


def test_a_rank_keeps_its_part_and_the_shape() -> None:
    layer = built(1)
    for parameter, shape in ((layer.weight, (4, 5)), (layer.bias, (4,))):
        assert is_part(parameter)
        assert parameter.shape == shape
        assert parameter.untyped_storage().nbytes() <= 4
        assert torch.zeros_like(parameter).is_contiguous()
        assert parameter.requires_grad
        assert parameter.is_leaf
    parts = [detach_part(built(rank).weight) for rank in range(3)]
    assert [part.part.numel() for part in parts if part is not None] == [7, 7, 6]


@torch.no_grad()
def _scale(layer: nn.Linear) -> None:
    layer.weight *= 0.5
    layer.weight[1:3, 0] = 7.0


def _by_data(layer: nn.Linear) -> None:
    torch.manual_seed(2)
    layer.weight.data.normal_(0.0, 0.02)
    layer.bias.data.zero_()  # which lets go of the weight again
    layer.weight.data[2].zero_()


def _held_elsewhere(layer: nn.Linear) -> None:
    data = layer.weight.data
    layer.bias.data.zero_()
    data.fill_(3.0)


@torch.no_grad()
def _slices(layer: nn.Linear) -> None:
    torch.manual_seed(2)
    for rows in layer.weight.chunk(2):
        nn.init.xavier_uniform_(rows)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "nothing": lambda layer: None,
    "initialised": lambda layer: nn.init.trunc_normal_(layer.weight, generator=torch.Generator().manual_seed(2)),
    "by .data": _by_data,
    "held elsewhere": _held_elsewhere,
    "slices": _slices,
    "scaled": _scale,
    "assigned": lambda layer: setattr(layer.weight, "data", torch.arange(20.0).view(4, 5)),
    "loaded": lambda layer: layer.load_state_dict({"weight": torch.arange(20.0).view(4, 5), "bias": torch.ones(4)}),
    "converted": lambda layer: layer.to(torch.bfloat16),
    "reset": lambda layer: layer.reset_parameters(),
    "applied": lambda layer: layer.apply(lambda m: nn.init.orthogonal_(m.weight)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_initialisers_write_after_wrap_is_kept(change: str) -> None:
    want = plain(CHANGES[change])
    got = whole(CHANGES[change])
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_it_is_whole_for_no_longer_than_something_writes_to_it() -> None:
    layers = [built(0) for _ in range(4)]
    for layer in layers:
        layer.weight.data.normal_()
        layer.bias.data.normal_()
    large = [p for layer in layers for p in layer.parameters() if p.untyped_storage().nbytes() > 4]
    assert len(large) == 1


@torch.no_grad()
def test_one_is_written_from_another() -> None:
    parts = []
    for rank in range(3):
        teacher, student = built(rank), built(rank)
        student.weight.data.fill_(2.0)
        teacher.bias.data.fill_(1.0)
        teacher.weight.copy_(student.weight)  # either may be open
        student.weight.mul_(3.0)
        teacher.weight.lerp_(student.weight, 0.5)
        kept = detach_part(teacher.weight)
        assert kept is not None
        parts.append(kept.part)
    assert torch.cat(parts).tolist() == [4.0] * 20


def test_a_copy_keeps_its_part() -> None:
    layer = built(0)
    layer.bias.data.fill_(2.0)  # and is open as it is copied
    twin = copy.deepcopy(nn.ModuleList([layer, nn.Linear(5, 4)]))
    twin[1].weight = twin[0].weight  # type: ignore[assignment]
    again = copy.deepcopy(twin)
    assert again[0].weight is again[1].weight
    for name in ("weight", "bias"):
        kept, of_twin = detach_part(getattr(layer, name)), detach_part(getattr(again[0], name))
        assert isinstance(kept, KeptPart)
        assert isinstance(of_twin, KeptPart)
        assert torch.equal(kept.part, of_twin.part)
        assert kept.part.data_ptr() != of_twin.part.data_ptr()
        assert kept.digest == of_twin.digest


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "linear": lambda layer: layer(torch.ones(1, 5)),
    "norm": lambda layer: layer.weight.norm(),
    "detach": lambda layer: layer.state_dict(),
    "clone": lambda layer: layer.weight.clone(),
    "add": lambda layer: layer.weight + 1,
    "cat": lambda layer: torch.cat([layer.weight, layer.weight]),
    "tolist": lambda layer: layer.bias.tolist(),
    "pickle": lambda layer: pickle.dumps(layer),
}


@pytest.mark.parametrize("read", READS)
def test_reading_is_refused(read: str) -> None:
    message = refusal(ShardingError, lambda: READS[read](built(0)))
    assert_says(
        message, f"{read} needs the whole of a parameter of shape (4", "before wrap()", "auto_wrap_policy={MyBlock}"
    )


def test_what_is_computed_of_other_ranks_elements_is_refused() -> None:
    layer = built(0)
    with torch.no_grad():
        layer.weight.data /= layer.weight.data.sum()
    message = refusal(ShardingError, lambda: check_same_parts(layer, Alone(0)))
    assert_says(message, "'weight' was computed after wrap() from elements that other ranks keep", "wrap() it last")


@pytest.mark.parametrize("change", ["nothing", "scaled", "by .data"])
def test_ranks_with_other_values_are_told(change: str) -> None:
    layer = built(0)
    CHANGES[change](layer)
    check_same_parts(layer, Alone(0))
    filled, scaled = built(1), built(1)
    filled.weight.data.fill_(3.0)
    _scale(scaled)
    for other in (filled, *([] if change == "scaled" else [scaled])):
        digests: list[Any] = []
        check_same_parts(other, Alone(1, others=lambda own, digests=digests: digests.append(own) or own))
        message = refusal(ShardingError, lambda d=digests: check_same_parts(layer, Alone(0, others=lambda own: d[0])))  # type: ignore[misc]
        assert_says(
            message, "ranks have built 'weight' with different values", "seed_everything(...)", "auto_wrap_policy"
        )


def test_every_rank_looks_closer_if_one_differs() -> None:
    layers = [built(rank) for rank in range(3)]
    assert on_threads(3, lambda runtime: check_same_parts(layers[runtime.rank], runtime)) == [None] * 3
    _scale(layers[2])
    for error in on_threads(3, lambda runtime: check_same_parts(layers[runtime.rank], runtime)):
        assert isinstance(error, ShardingError)
        assert_says(str(error), "ranks have built 'weight' with different values")


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.data[3].zero_(),
        lambda layer: layer.weight.data[:2].fill_(1.0),
        lambda layer: layer.bias.data[1:3].fill_(1.0),
    ],
    ids=["a row of one rank", "rows", "of the bias"],
)
def test_rows_that_some_ranks_keep_may_be_written(write: Callable[[nn.Linear], Any]) -> None:
    told: list[Any] = []
    for rank in range(3):
        layer = built(rank)
        write(layer)
        check_same_parts(layer, Alone(rank, others=lambda own: told.append(own) or own))
    assert told[0] == told[-1]
    assert torch.equal(whole(write), plain(write))


@pytest.mark.parametrize("how", ["a parameter", "a buffer", "a layer that is marked later", "a layer in its place"])
def test_what_is_computed_of_what_was_read_is_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(5, 4))
    with kept_as_built(Alone(0)):
        fsdp_core.wrap(model[0])
        if how == "a buffer":
            model.register_buffer("start", model[0].weight.data.abs())
        else:
            model[1].weight.data.copy_(model[0].weight.data)
        if how == "a layer that is marked later":
            fsdp_core.wrap(model[1])
        if how == "a layer in its place":
            model[0] = nn.ReLU()
    message = refusal(ShardingError, lambda: check_same_parts(model, Alone(0)))
    name = "'start'" if how == "a buffer" else "'1.weight'"
    assert_says(message, name, "after wrap()", "auto_wrap_policy={MyBlock}")


def test_parameters_that_are_not_divided() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))
            self.none = nn.Parameter(torch.ones(0, 3))
            self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
            self.meta = nn.Parameter(torch.ones(4, device="meta"))
            self.lazy = nn.LazyLinear(3)
            self.register_buffer("mean", torch.ones(4))

    module = Mixed()
    keep_parts(module, Alone(0))
    assert not any(is_part(p) for p in module.parameters())
    with kept_as_built(None):
        assert not is_part(fsdp_core.wrap(nn.Linear(2, 2)).weight)
    with kept_as_built(Alone(0, ranks=1)):
        assert not is_part(fsdp_core.wrap(nn.Linear(2, 2)).weight)
    assert not is_part(fsdp_core.wrap(nn.Linear(2, 2)).weight)


def test_half_precision_is_kept_too() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        kept = detach_part(built(2, dtype=dtype).weight)
        assert kept is not None
        assert kept.part.dtype is dtype
