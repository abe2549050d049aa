"""Ranks that use different parameters of one unit: each gradient is still the mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, Trained
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, requires
from fsdp_core.testing.suite.numerics.parity import assert_same

__all__ = ["BranchesSuite"]

#: The experts that a rank's rows pass through, in order.
Experts = tuple[str, ...]

NONE: Experts = ()
FIRST: Experts = ("first",)
SECOND: Experts = ("second",)
BOTH: Experts = ("first", "second")

#: By case, the experts of rank 0 and rank 1 in each of two micro-batches. Both always call the unit, as they must.
CASES: dict[str, Sequence[tuple[Experts, Experts]]] = {
    "unused on one rank": [(BOTH, FIRST), (BOTH, FIRST)],
    "unused on all ranks": [(FIRST, FIRST), (FIRST, FIRST)],
    "used twice on one rank": [(FIRST + BOTH, BOTH), (FIRST + BOTH, BOTH)],
    "nothing used on one rank": [(NONE, BOTH), (FIRST, NONE)],
    "an expert for each rank": [(FIRST, SECOND), (SECOND, FIRST)],
    "a layer called twice": [(BOTH, FIRST), (FIRST, NONE)],
    "two layers skipped on one rank": [(FIRST, NONE), (NONE, BOTH)],
    "a frozen layer skipped on one rank": [(FIRST, NONE), (NONE, BOTH)],
}


class Layer(nn.Module):
    """A unit with experts. A forward pass uses the given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))

    def forward(self, x: Tensor, experts: Experts) -> Tensor:
        for expert in experts:
            x = x + torch.tanh(self.get_submodule(expert)(x)) * self.scale
        return x


class Routed(nn.Module):
    """A layer that ranks use differently, between two layers that all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.inp, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
            self.layer = fsdp_core.wrap(Layer())

    def forward(self, x: Tensor, experts: Experts) -> Any:
        return self.out(self.layer(self.inp(x), experts))


class Repeated(Routed):
    """The layer is called twice: with the first expert, then with the others."""

    def forward(self, x: Tensor, experts: Experts) -> Any:
        x = self.layer(self.inp(x), experts[:1])
        x = self.layer(x, experts[1:])
        return self.out(x)


class Stacked(Routed):
    """Two such layers in a row, with nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(2):
            self.second_layer = fsdp_core.wrap(Layer())

    def forward(self, x: Tensor, experts: Experts) -> Any:
        x = self.layer(self.inp(x), experts)
        x = self.second_layer(x, experts)
        return self.out(x)


class Frozen(Stacked):
    """The second layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.second_layer.requires_grad_(False)


#: The models of the cases that don't use :class:`Routed`.
NETS: dict[str, type[Routed]] = {
    "a layer called twice": Repeated,
    "two layers skipped on one rank": Stacked,
    "a frozen layer skipped on one rank": Frozen,
}


def _decaying(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that changes a parameter whose gradient is zero, but not one whose gradient is ``None``."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def _train(strategy: str | None, case: str, accumulate: int) -> Trained:
    """Train on ranks with their own experts, or in one process on each rank's rows with that rank's experts."""
    loop = Loop(strategy, _decaying, NETS.get(case, Routed)())
    losses = []
    batches = loop.batches(len(CASES[case]))
    for index, (x, y) in enumerate(batches):
        experts_by_rank = CASES[case][index]
        is_last = (index + 1) % accumulate == 0
        with loop.unreduced(not is_last):
            if loop.fabric is None:
                rank_losses = []
                for rank, experts in enumerate(experts_by_rank):
                    rank_x = x[rank::2]
                    rank_y = y[rank::2]
                    rank_losses.append(mse_loss(loop.net(rank_x, experts), rank_y))
                loss = torch.stack(rank_losses).mean()
            else:
                experts = experts_by_rank[loop.fabric.global_rank]
                loss = mse_loss(loop.model(x, experts), y)
            losses.append(loss.detach())
            loop.backward(loss)
        if is_last:
            loop.step()
    return loop.means(losses), loop.state()


class BranchesSuite(Clauses):
    """Ranks may use different parameters of a unit, as long as all of them call the unit."""

    @on_ranks("processes", "threads")
    @pytest.mark.parametrize(
        "accumulate",
        [1, pytest.param(2, marks=requires(Capability.GRADIENT_ACCUMULATION))],
        ids=["each step", "accumulated"],
    )
    @pytest.mark.parametrize("case", CASES)
    def test_ranks_use_different_parameters(self, ranks: Ranks, case: str, accumulate: int) -> None:
        """Ranks may use different parameters of a unit: losses and weights must equal the unsharded model's."""
        assert_same(ranks.run(2, _train, self.strategy, case, accumulate), _train(None, case, accumulate))
