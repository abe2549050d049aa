"""Rank 0's values reach every rank through the runtime, whatever that is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from checkpoint_ranks import on_threads
from fsdp_core.sharding import place
from fsdp_core.state.fqn import aliases

RANKS = 2


def test_each_rank_gets_the_values_of_rank_0() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(RANKS)]
    for rank, model in enumerate(models):
        model[1].running_mean.fill_(-0.0 if rank == 0 else rank)  # a sum with zeros would lose the sign
    wanted = {name: value.clone() for name, value in models[0].state_dict().items()}
    assert not torch.equal(models[1][0].weight, wanted["0.weight"]), "the models begin alike"

    # Ranks that are threads, of which torch.distributed knows nothing.
    assert on_threads(RANKS, lambda runtime: place(list(models[runtime.rank].modules()), runtime)) == [None] * RANKS

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


def test_where_torch_can_not_change_a_parameters_device_the_module_gets_another() -> None:
    """As on devices of vendors (PrivateUse1). torch refuses the same for the meta device."""
    tied = nn.Linear(3, 3)
    model = nn.ModuleList([tied, nn.Linear(3, 3), nn.Linear(2, 3)])
    model[1].weight = tied.weight
    model[2].weight.requires_grad_(False)
    before = list(model.parameters())
    runtime: Any = SimpleNamespace(device=torch.device("meta"), broadcast=lambda tensor: tensor)

    place(list(model.modules()), runtime, init=lambda module: None)

    assert [p.device.type for p in model.parameters()] == ["meta"] * len(before)
    assert model[1].weight is tied.weight
    assert not model[2].weight.requires_grad
    assert model[2].bias.requires_grad
    assert [p.device.type for p in before] == ["cpu"] * len(before)
