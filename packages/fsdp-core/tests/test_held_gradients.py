"""Gradients of an unfinished accumulation: saved by rank, and put back on as many ranks or on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from damaged_folders import save_alone
from fsdp_core import checkpoint
from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.gradients.replicated import ReplicatedParameters
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.held_gradients import HeldGradients, describe_gradients, gradients_of_rank


class Replicated(Sharded):
    """Keeps every parameter whole."""

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        super().__init__(module)
        self.replicated = ReplicatedParameters(list(module.parameters()), module, runtime)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.replicated.sync = False
        yield
        self.replicated.sync = True


class Replicating(Backend):
    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> Sharded:
        return Replicated(module, self.runtime)


def _model() -> tuple[nn.Module, Sharded]:
    backend = Replicating()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    torch.manual_seed(0)
    sharded = backend.shard(nn.Linear(3, 2))
    return sharded.root, sharded


class OneOf(ProcessGroupRuntime):
    """One of several ranks, whose gradients are given."""

    def __init__(self, rank: int, held: list[HeldGradients]) -> None:
        super().__init__()
        self.rank, self.world_size, self.held = rank, len(held), held

    def gather_objects(self, obj: Any) -> list[Any]:
        return [{name: (tuple(grad.shape), grad.dtype) for name, grad in one.own.items()} for one in self.held]


def _saved(held: list[HeldGradients]) -> dict[str, Any]:
    """What ranks that hold these would have saved, whole."""
    parts = [describe_gradients(one, OneOf(rank, held)) for rank, one in enumerate(held)]
    assert all(part is not None for part in parts)
    first: Any = parts[0]
    return {
        "own": {
            rank: {name: parts[int(rank)]["own"][rank][name].chunks[0].data for name in grads}  # type: ignore[index]
            for rank, grads in first["own"].items()
        },
        "reduced": first["reduced"],
    }


def test_nothing_is_saved_of_nothing() -> None:
    assert describe_gradients(HeldGradients(), ProcessGroupRuntime()) is None


def test_every_rank_names_the_gradients_of_all() -> None:
    held = [HeldGradients(own={"a": torch.ones(2)}), HeldGradients(own={"a": torch.ones(2), "b": torch.ones(())})]
    for rank in (0, 1):
        own: Any = describe_gradients(held[rank], OneOf(rank, held))["own"]  # type: ignore[index]
        assert {r: list(grads) for r, grads in own.items()} == {"0": ["a"], "1": ["a", "b"]}
        for of, grads in own.items():
            assert all(len(grad.chunks) == (int(of) == rank) for grad in grads.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_many_ranks_get_their_own_and_others_the_mean(world_size: int, dtype: torch.dtype) -> None:
    first, second = torch.tensor([1.0, 3.0], dtype=dtype), torch.tensor([2.0, 5.0], dtype=dtype)
    saved = _saved([HeldGradients(own={"a": first}), HeldGradients(own={"a": second, "b": second})])
    for rank in range(world_size):
        runtime = OneOf(rank, [HeldGradients()] * world_size)
        got = {name: read() for name, read in gradients_of_rank(saved, runtime).items()}
        mean = {"a": (first + second) / 2, "b": second / 2}  # who had no gradient had one of zero
        want: dict[str, Tensor] = ([{"a": first}, {"a": second, "b": second}][rank]) if world_size == 2 else mean
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], grad) and got[name].dtype == dtype for name, grad in want.items())


@pytest.mark.parametrize("batches", [1, 3])
def test_backend_without_shards_goes_on(tmp_path: Path, batches: int) -> None:
    x = torch.randn(batches + 1, 3)
    model, sharded = _model()
    for i in range(batches):
        model(x[i]).sum().backward()
    gradients = fsdp_core.AccumulatedGradients(model)
    save_alone(tmp_path / "it", {"gradients": gradients.state_dict()}, runtime=sharded.runtime)
    model(x[batches]).sum().backward()
    other, _ = _model()
    other(torch.ones(3)).sum().backward()  # replaced
    fsdp_core.AccumulatedGradients(other).load_state_dict(checkpoint.load(tmp_path / "it")["gradients"])
    other(x[batches]).sum().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_reduced_ones_are_added_to_own_ones() -> None:
    _, sharded = _model()
    sharded.restore_gradients({"bias": lambda: torch.ones(2)}, {"bias": torch.tensor([1.0, 2.0])})
    held = sharded.accumulated_gradients()
    assert {name: grad.tolist() for name, grad in held.own.items()} == {"bias": [2.0, 3.0]}


@pytest.mark.parametrize("kind", ["own", "reduced"])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("wieght", (2, 3), "'wieght', but Linear has no such parameter"), ("weight", (3, 2), "shape")],
)
def test_gradients_of_another_model_are_refused(kind: str, name: str, shape: tuple[int, ...], message: str) -> None:
    _, sharded = _model()
    own = {name: lambda: torch.ones(shape)} if kind == "own" else {}
    with pytest.raises(CheckpointMismatchError, match=message):
        sharded.restore_gradients(own, {} if kind == "own" else {name: torch.ones(shape)})


def test_a_model_that_was_not_set_up_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"not sharded.*\n.*fabric\.setup"):
        fsdp_core.AccumulatedGradients(nn.Linear(1, 1))
