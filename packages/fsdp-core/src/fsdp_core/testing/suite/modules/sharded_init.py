"""Layers marked with ``fsdp_core.wrap()``, which backends may shard while the model is being built."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import wrap
from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.oracle import FEATURES, WIDE, Block
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = ["BuiltInPartsSuite"]

TOKENS = 11


class Nested(nn.Module):
    """A unit that contains a unit and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wrap(Block(width=WIDE))
        self.outer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.rand(FEATURES))

    def forward(self, x: Tensor) -> Any:
        return self.outer(self.inner(x)) * self.scale


class Written(nn.Module):
    """A model whose ``__init__`` replaces, copies, ties, initialises, loads and freezes layers that it has marked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = wrap(nn.Embedding(TOKENS, FEATURES, padding_idx=0))
        self.blocks = nn.ModuleList([wrap(Block(width=WIDE)) for _ in range(3)])
        self.blocks[1] = wrap(Nested())  # instead of a block that was marked
        self.teacher = copy.deepcopy(self.blocks[0])
        self.head = nn.Linear(FEATURES, TOKENS)
        self.head.weight = self.embed.weight
        self.apply(self._initialise)
        self.load_state_dict({"head.bias": torch.linspace(0.0, 1.0, TOKENS)}, strict=False)
        self.blocks[0].down.requires_grad_(False)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.5)
            module.weight.data[0].zero_()
        elif isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.bias, 0.25)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.teacher(x))[:, :FEATURES]


class _Configured(Lit):
    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = None
        self.drawn: Tensor | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with oracle.seeded(1):
                self.net = Written()
                self.drawn = torch.rand(3)

    def on_validation_start(self) -> None:
        self.state = full_state(self.trainer.strategy)


def _train_configured(strategy: str, tmp: str, world_size: int) -> tuple[dict[str, Tensor], Tensor | None]:
    module = _Configured("sgd")
    run = new_trainer(tmp, strategy, world_size)
    run.validate(module, loader(1, world_size), verbose=False)
    return {name.removeprefix("net."): tensor for name, tensor in module.state.items()}, module.drawn


def _train_initialised(strategy: str, world_size: int) -> tuple[dict[str, Tensor], Tensor]:
    fabric = new_fabric(strategy, world_size)
    with oracle.seeded(1), fabric.init_module():
        net = Written()
        drawn = torch.rand(3)
    fabric.setup(net)
    return full_state(fabric.strategy), drawn


def _built_otherwise(strategy: str, case: str) -> str | list[float]:
    """The error on this rank if ranks build different models, or else the model's values."""
    fabric = new_fabric(strategy)
    rank = rank_context().rank
    with fabric.init_module():
        layer = nn.Linear(FEATURES, FEATURES)
        nn.init.constant_(layer.weight, 1.0 + rank if case == "values" else 1.0)
        if case == "values" or rank == 1:
            wrap(layer)
        net = nn.Sequential(layer, nn.Linear(FEATURES, 1))
    try:
        fabric.setup(net)
    except ShardingError as error:
        return str(error)
    values: list[float] = full_state(fabric.strategy)["0.weight"].unique().tolist()
    return values


def _train_seeded_otherwise(strategy: str) -> tuple[dict[str, Tensor], Tensor]:
    """The model that differently seeded ranks build, and a random number that each draws afterwards."""
    fabric = new_fabric(strategy)
    torch.manual_seed(5 + rank_context().rank)
    with fabric.init_module():
        net = nn.Sequential(wrap(nn.Linear(FEATURES, FEATURES)), nn.Linear(FEATURES, 1))
    drawn = torch.rand(1)
    fabric.setup(net)
    return full_state(fabric.strategy), drawn


class BuiltInPartsSuite(Clauses):
    """However a strategy shards layers while they are built, the model is the one that one process would build."""

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_marked_layers_have_the_values_of_the_unsharded_model(
        self, ranks: Ranks, tmp_path: Path, front_end: str
    ) -> None:
        """Marked layers must get one process's values, even if initialised, tied, copied or loaded after marking."""
        with oracle.seeded(1):
            want = Written().state_dict()
            drawn = torch.rand(3)
        if front_end == "trainer":
            got = ranks.run(3, _train_configured, self.strategy, str(tmp_path), 3)
        else:
            got = ranks.run(3, _train_initialised, self.strategy, 3)
        for state, drawn_by_rank in got:
            assert torch.equal(drawn_by_rank, drawn), "building the model has changed the sequence of random numbers"
            assert sorted(state) == sorted(want)
            for name, tensor in want.items():
                assert torch.equal(state[name].cpu(), tensor), f"{name} is not what one process builds"

    @on_ranks("processes")  # threads share one random generator, and a controller is a single process
    def test_ranks_that_are_seeded_differently_build_rank_zeros_model(self, ranks: Ranks) -> None:
        """Every rank must get rank 0's weights, and continue its own sequence of random numbers."""
        torch.manual_seed(5)
        want = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)).state_dict()
        allowed_on_rank_0 = [torch.rand(1)]
        torch.manual_seed(6)
        allowed_on_rank_1 = [torch.rand(1)]
        torch.manual_seed(6)
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1))
        allowed_on_rank_1.append(torch.rand(1))  # if rank 1 builds its own model before it gets rank 0's values
        results = ranks.run(2, _train_seeded_otherwise, self.strategy)
        for (state, drawn), allowed in zip(results, (allowed_on_rank_0, allowed_on_rank_1), strict=True):
            assert any(torch.equal(drawn, number) for number in allowed)
            for name, tensor in want.items():
                assert torch.equal(state[name].cpu(), tensor), name

    @pytest.mark.parametrize(
        ("case", "words"),
        [
            ("values", ["'0.weight' with different values", "seed_everything", "auto_wrap_policy={MyBlock}"]),
            ("a layer that one rank alone marks", ["rank 1 has not set up the same", "0"]),
        ],
    )
    def test_ranks_that_do_not_build_the_same(self, ranks: Ranks, case: str, words: list[str]) -> None:
        """If ranks build different models, raise an error or use rank 0's values: neither a mixture nor a hang."""
        for result in ranks.run(2, _built_otherwise, self.strategy, case):
            if isinstance(result, str):
                assert_says(result, *words)
            else:
                assert result == [1.0]
