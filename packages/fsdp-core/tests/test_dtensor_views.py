"""What is written to a part of a DTensor reaches it, though torch gives out a copy of the part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.outside_steps.error_notes import explain_shards
from fsdp_core.testing import RankPool
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.torch_private.dtensor_random import draw_for_shards
from fsdp_core.torch_private.dtensor_views import write_through_copied_views

#: What DTensor does with views of views is wrong before this.
IS_OLD = torch.__version__ < "2.13"


def set_values(tensor: Tensor) -> None:
    tensor[0] = 0
    tensor[:, 1] = 2.0
    tensor[2:4] = tensor[5]
    tensor[...] = 1
    tensor[6, 2] = 4


def write_in_a_chain(tensor: Tensor) -> None:
    rows = tensor[1:4]
    rows[0].mul_(3.0)
    rows.data[2].add_(1.0)
    rows.detach().t()[0].sub_(5.0)
    _, second = rows.split(2)
    second.mul_(7.0)
    rows.view(-1)[2:4].fill_(9.0)


def read_after_other_writes(tensor: Tensor) -> None:
    rows = tensor[1:4]
    tensor.mul_(2.0)
    tensor[0:3].add_(rows * 1.0)
    rows.add_(1.0)
    tensor[1].copy_(rows[0] + rows[1])


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """A value for an operation of a tensor: the same on all ranks, for one that is sharded."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)


def write_by_index(tensor: Tensor) -> None:
    rows = like(tensor, torch.tensor([6, 0]))
    tensor.index_add_(0, rows, like(tensor, torch.ones(2, 3)), alpha=2.0)
    tensor.index_copy_(0, rows, like(tensor, torch.full((2, 3), 5.0)))
    tensor.scatter_add_(0, like(tensor, torch.tensor([[6, 1, 0]])), like(tensor, torch.ones(1, 3)))
    tensor.index_add_(1, like(tensor, torch.tensor([2])), like(tensor, torch.ones(7, 1)))
    if not IS_OLD:
        tensor[1:4].index_add_(0, like(tensor, torch.tensor([1])), like(tensor, torch.ones(1, 3)))


def fill_a_sum(tensor: Tensor) -> None:
    total = tensor.sum(0)
    tensor.sub_(total.fill_(2.0))
    total = tensor.sum(0)
    tensor.add_(total.masked_fill_(total > 60.0, 3.0))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda tensor: tensor[0].zero_(),
    "rows": lambda tensor: tensor[:5].mul_(0.5),
    "narrow": lambda tensor: tensor.narrow(0, 1, 3).add_(1.0),
    "chunk": lambda tensor: tensor.chunk(3)[1].zero_(),
    "split": lambda tensor: tensor.split([3, 4])[0].neg_(),
    "diagonal": lambda tensor: tensor.diagonal().fill_(3.0),
    "data": lambda tensor: tensor.data[5].clamp_(max=4.0),
    "another row": lambda tensor: tensor[1:3].copy_(tensor[3:5]),
    "several at once": lambda tensor: torch._foreach_mul_([tensor[0], tensor[6]], 2.0),
    "out": lambda tensor: torch.mul(tensor[2], 2.0, out=tensor[2]),
    "divided by its norm": lambda tensor: tensor[2].div_(tensor[2].norm()),
    "assignments": set_values,
    "indices": write_by_index,
    "a sum": fill_a_sum,
}
if not IS_OLD:
    WRITES |= {"a chain": write_in_a_chain, "after other writes": read_after_other_writes}


def write_all() -> dict[str, bool]:
    write_through_copied_views()
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    meshes: list[tuple[DeviceMesh, list[Any]]] = [
        (line, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
    ]
    is_right: dict[str, bool] = {}
    for name, write in WRITES.items():
        for mesh, placements in meshes:
            expected = torch.arange(21.0).view(7, 3)
            tensor = distribute_tensor(expected.clone(), mesh, placements)
            with torch.no_grad():
                write(tensor)
                write(expected)
            is_right[f"{name} on {placements}"] = torch.allclose(tensor.full_tensor(), expected)
    return is_right


def test_writes_to_parts_reach_the_dtensor(ranks: RankPool) -> None:
    for is_right in ranks.run(4, write_all):
        assert [name for name, right in is_right.items() if not right] == []


def write_with_a_norm() -> list[str]:
    """A parameter without dimensions is no DTensor, and torch raises an error without a word."""
    mesh = init_device_mesh("cpu", (2,))
    norm = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).norm()
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        torch.ones(()).mul_(norm)
    explain_shards(raised.value)
    torch.ones(()).mul_(norm.full_tensor())  # type: ignore[attr-defined]
    return raised.value.__notes__


def test_a_write_with_a_dtensor_says_what_to_write(ranks: RankPool) -> None:
    for (note,) in ranks.run(2, write_with_a_norm):
        assert "DTensor" in note
        assert IS_OLD or "norm = norm.full_tensor(), on all ranks" in note


def write_what_is_refused() -> tuple[list[str], str, list[str], float]:
    write_through_copied_views()
    mesh = init_device_mesh("cpu", (2,))
    tensor: DTensor = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)])
    drawn = refusal(UnsupportedCapabilityError, lambda: tensor[0].normal_())
    losses: list[Callable[[], Any]] = [
        lambda: torch.nn.functional.mse_loss(tensor, tensor * 2),
        lambda: torch.nn.functional.binary_cross_entropy(tensor.sigmoid(), tensor.sigmoid()),
    ]
    averaged = [refusal(UnsupportedCapabilityError, loss) for loss in losses]
    kernel = like(tensor, torch.ones(3, 1, 3))
    statistics = like(tensor, torch.zeros(7))
    ways: list[Callable[[], Any]] = [
        lambda: torch.nn.functional.conv1d(tensor.t()[None], kernel, groups=3),
        lambda: torch.nn.functional.batch_norm(tensor.t(), statistics, statistics + 1.0, training=True),
    ]
    parted = [refusal(UnsupportedCapabilityError, way) for way in ways]
    squeezed: Any = torch.squeeze_copy(distribute_tensor(torch.ones(3, 1), mesh, [Shard(0)]))
    assert squeezed.full_tensor().shape == (3,)
    mean: Any = torch.nn.functional.mse_loss(tensor, tensor * 2, reduction="none").mean()
    return averaged, drawn, parted, float(mean.full_tensor())


def test_what_would_be_each_ranks_own_is_refused(ranks: RankPool) -> None:
    for averaged, drawn, parted, mean in ranks.run(2, write_what_is_refused):
        assert_says(drawn, "normal_ was called on a part of a sharded parameter", "torch.randn_like(p)")
        for name, message in zip(("mse_loss", "binary_cross_entropy"), averaged, strict=True):
            assert_says(message, f"{name} of a sharded parameter", "differ in size", "reduction='none').mean()")
        for name, message in zip(("a convolution of a sharded", "a batch normalisation of"), parted, strict=True):
            assert_says(message, name, "full_tensor()", "on all ranks")
        assert mean == torch.arange(21.0).square().mean()


EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda tensor: tensor.max(),
    "min of int": lambda tensor: tensor.long().min(),
    "amax": lambda tensor: tensor.amax(0),
    "argmax": lambda tensor: tensor.argmax(),
    "argmin": lambda tensor: tensor.argmin(0),
    "aminmax": lambda tensor: tensor.aminmax(dim=0)[1],
    "infinity norm": lambda tensor: tensor.norm(float("inf")),
    "infinity norms": lambda tensor: torch._foreach_norm([tensor, tensor], float("inf"))[1],
    "largest of several": lambda tensor: torch._foreach_max([tensor, tensor])[0],
    "distance": lambda tensor: torch.dist(tensor, tensor * 2, float("inf")),
}

#: What torch's value or gradient of is wrong.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda tensor: tensor.max(),
    "amax": lambda tensor: tensor.amax(),
    "infinity norm": lambda tensor: tensor.norm(float("inf")),
    "least absolute value": lambda tensor: torch.linalg.vector_norm(tensor, -float("inf")),
    "infinity norms": lambda tensor: torch._foreach_norm([tensor, tensor], float("inf"))[1],
    "norms of columns": lambda tensor: tensor.norm(dim=0).sum() + tensor.norm(3, dim=0).nansum(),
    "stacked norms": lambda tensor: torch.stack([tensor.norm(), 2 * tensor.norm()]).sum(),
    "any": lambda tensor: ((tensor > 0.5).any(0) * 2 * tensor).sum(),
    "no dimension": lambda tensor: tensor.square().sum(dim=[]) + tensor.mean(dim=[]),
}


def find_extremes() -> list[str]:
    """What is not that of the whole tensor, of tensors of which some ranks have no element."""
    write_through_copied_views()
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases: list[tuple[DeviceMesh, list[Any], tuple[int, ...]]] = [
        (line, [Shard(0)], (5, 3)),
        (line, [Shard(1)], (4, 3)),
        (grid, [Shard(0), Shard(0)], (3, 3)),
        (grid, [Replicate(), Shard(0)], (1, 3)),
    ]
    wrong = []
    for mesh, placements, shape in cases:
        full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        tensor = distribute_tensor(full.clone(), mesh, placements)
        wrong += [
            f"{name} of {shape} on {placements}"
            for name, find in EXTREMES.items()
            if not torch.equal(find(tensor).full_tensor(), find(full))
        ]
        if placements == [Shard(1)]:  # in strides then; torch flattens none of the others
            wrong += [] if torch.equal(tensor.flatten().max().full_tensor(), full.max()) else ["flattened"]
        full.view(-1)[-1] = full.view(-1)[0] = 5.0  # two largest elements, on different ranks
        for name, loss in LOSSES.items():
            plain = full.clone().requires_grad_()
            leaf: Any = distribute_tensor(full.clone(), mesh, placements).requires_grad_()
            value: Any = loss(leaf)
            value.full_tensor().backward()
            loss(plain).backward()
            try:
                torch.testing.assert_close((value.full_tensor(), leaf.grad.full_tensor()), (loss(plain), plain.grad))
            except AssertionError:
                wrong.append(f"{name} of {shape} on {placements} as a loss")
    return wrong


@pytest.mark.skipif(IS_OLD, reason="DTensor lacks some of these operations")
def test_extremes_of_a_tensor_of_which_some_ranks_have_nothing(ranks: RankPool) -> None:
    """Ranks without elements raised, and the others waited for them."""
    assert ranks.run(4, find_extremes) == [[]] * 4


DRAWS: dict[str, Callable[[DTensor], Any]] = {
    "normal_": lambda tensor: tensor.normal_(),
    "uniform_": lambda tensor: tensor.uniform_(-1.0, 1.0),
    "exponential_": lambda tensor: tensor.exponential_(),
    "bernoulli_": lambda tensor: tensor.bernoulli_(0.5),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "bernoulli": lambda tensor: torch.bernoulli(tensor.fill_(0.5)),
    "dropout": lambda tensor: torch.nn.functional.dropout(tensor.fill_(1.0)),
    "a generator": lambda tensor: tensor.normal_(generator=torch.Generator().manual_seed(1)),
}

#: Whose numbers are all different, so that none of another shard is among them.
_ALL_DIFFER = {"normal_", "uniform_", "exponential_", "randn_like", "rand_like", "a generator"}


def draw_all(is_seeded_alike: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """What is drawn for DTensors, whole, and what the rank draws after that."""
    draw_for_shards()
    grid = init_device_mesh("cpu", (2, 2))
    sliced = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))["data_parallel"]
    drawn: dict[str, tuple[Tensor, Tensor]] = {}
    for mesh, placements in (
        (init_device_mesh("cpu", (4,)), [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Replicate(), Replicate()]),
        (sliced, [Shard(0)]),
    ):
        for name, draw in DRAWS.items():
            torch.manual_seed(0 if is_seeded_alike else torch.distributed.get_rank())
            tensor: DTensor = distribute_tensor(torch.zeros(7, 3), mesh, placements)
            drawn[f"{name} on {len(drawn)}"] = draw(tensor).full_tensor(), torch.rand(1)
    return drawn


@pytest.mark.parametrize("is_seeded_alike", [False, True])
def test_random_numbers_are_those_of_shards(ranks: RankPool, is_seeded_alike: bool) -> None:
    of_ranks = ranks.run(4, draw_all, is_seeded_alike)
    for name, (numbers, after) in of_ranks[0].items():
        for of_rank in of_ranks[1:]:
            assert torch.equal(of_rank[name][0], numbers), name
            assert not is_seeded_alike or torch.equal(of_rank[name][1], after), name
        if name.partition(" on")[0] in _ALL_DIFFER:
            assert len(numbers.unique()) == numbers.numel(), name
