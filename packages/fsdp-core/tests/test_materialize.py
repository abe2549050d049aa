"""Rank 0's values reach every rank through the runtime, whatever that is made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core import Runtime
from fsdp_core.sharding import place
from fsdp_core.state.fqn import aliases

RANKS = 2


class ThreadRuntime(Runtime):
    """A stranger's: ranks are threads, of which ``torch.distributed`` knows nothing."""

    def __init__(self, rank: int, said: list[Any], barrier: Barrier) -> None:
        self.rank, self.world_size = rank, RANKS
        self._said, self._barrier = said, barrier

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.gather_objects(obj)[src]

    def gather_objects(self, obj: Any) -> list[Any]:
        self._said[self.rank] = obj
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said

    def barrier(self) -> None:
        self._barrier.wait()

    def start(self, **_: Any) -> None: ...

    def stop(self) -> None: ...

    def all_reduce(self, tensor: Tensor, op: str = "mean", group: Any | None = None) -> Tensor:
        raise AssertionError("nothing is to be reduced")

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        raise AssertionError("nothing is to be gathered")


def test_each_rank_gets_the_values_of_rank_0() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(RANKS)]
    for rank, model in enumerate(models):
        model[1].running_mean.fill_(-0.0 if rank == 0 else rank)  # a sum with zeros would lose the sign
    wanted = {name: value.clone() for name, value in models[0].state_dict().items()}
    assert not torch.equal(models[1][0].weight, wanted["0.weight"]), "the models begin alike"
    said, barrier = [None] * RANKS, Barrier(RANKS, timeout=30)

    with ThreadPoolExecutor(RANKS) as pool:
        runtimes = [ThreadRuntime(rank, said, barrier) for rank in range(RANKS)]
        list(pool.map(lambda model, runtime: place(list(model.modules()), runtime), models, runtimes))

    for model in models:
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), name
            if value.is_floating_point():
                assert torch.equal(value.signbit(), wanted[name].signbit()), name


def test_shared_buffers_that_are_not_saved_have_no_further_names() -> None:
    """A checkpoint would look for the first of them."""
    table = nn.Module()
    table.register_buffer("angles", torch.ones(2), persistent=False)
    table.register_buffer("count", torch.zeros(()))
    layers = nn.ModuleDict({name: nn.ModuleDict({"table": table}) for name in ("a", "b")})
    assert aliases(layers) == {"b.table.count": "a.table.count"}
