"""What each rank holds, and as what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.suite.modules.shards import Shared
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer


def units_of(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, FSDPModule)]


def shared_units() -> tuple[list[str], list[str]]:
    net = Shared()
    new_fabric("fsdp2").setup(net)
    return units_of(net), [n for n, p in net.named_parameters() if not isinstance(p, DTensor)]


def units_after_stages(tmp: str, options: dict[str, Any]) -> list[list[str]]:
    module = Lit("sgd")
    run = new_trainer(tmp, "fsdp2", 2, options)
    found = []
    for stage in (run.test, run.fit, run.validate):
        stage(module, loader(1, 2))
        found.append(units_of(module))
    return found


def gathered_between_passes(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The units whose parameters are whole after a forward pass, and after the backward pass."""
    fabric = new_fabric("fsdp2", options=options)
    net = oracle.new_net()
    model = fabric.setup_module(net)
    loss = model(torch.ones(2, oracle.FEATURES)).sum()

    def whole() -> list[str]:
        return [
            name
            for name in units_of(net)
            if not isinstance(net.get_submodule(name).get_parameter(first[name]), DTensor)
        ]

    first = {name: next(n for n, p in net.get_submodule(name).named_parameters() if p.ndim) for name in units_of(net)}
    after_forward = whole()
    fabric.backward(loss)
    return after_forward, [name for name in whole() if name]


def test_tied_parameters_stay_in_one_unit(ranks: RankPool) -> None:
    for units, whole in ranks.run(2, shared_units):
        assert units == ["", "blocks.3"]
        assert whole == [f"blocks.{i}.gain" for i in range(4)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["", "blocks.2"]),  # the backward pass needs the last block first
        ({"reshard_after_forward": True}, [""]),
        ({"reshard_after_forward": False}, ["", "blocks.0", "blocks.1", "blocks.2"]),
    ],
    ids=str,
)
def test_units_kept_between_forward_and_backward(ranks: RankPool, options: dict[str, Any], kept: list[str]) -> None:
    assert ranks.run(2, gathered_between_passes, options) == [(kept, [])] * 2


@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": None}, {"auto_wrap_policy": {oracle.Block}}], ids=str)
def test_stages_leave_the_units_alone(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    root_only = options.get("auto_wrap_policy", "auto") is None
    want = [""] if root_only else ["", "net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert ranks.run(2, units_after_stages, str(tmp_path), options) == [[want] * 3] * 2


class Teacher(nn.Module):
    """Its average is taken as self-supervised methods take it."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.net, self.average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.average(x)


def averaged(assigned: bool) -> tuple[str, float]:
    """What is said of a forward pass after an average was taken, and how far off it is otherwise."""
    fabric = new_fabric("fsdp2")
    net, plain = Teacher(), Teacher()
    model, x = fabric.setup(net), torch.ones(2, 4)
    fabric.backward(model(x).sum())  # after which nothing is gathered
    for teacher in (net, plain):
        for mean, parameter in zip(teacher.average.parameters(), teacher.net.parameters(), strict=True):
            if assigned:
                mean.data = mean.data * 0.9 + parameter.data * 0.1
            else:
                mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
    try:
        return "", (model(x) - plain(x)).abs().max().item()
    except ShardingError as error:
        return str(error), 0.0


def test_an_average_that_is_assigned_to_data_is_refused_and_one_in_place_is_right(ranks: RankPool) -> None:
    """torch would keep the shard as it was, without a word."""
    for told, _ in ranks.run(2, averaged, True):
        assert "'average." in told
        assert "parameter.data.copy_(values)" in told
    for told, off in ranks.run(2, averaged, False):
        assert told == ""
        assert off < 1e-6
