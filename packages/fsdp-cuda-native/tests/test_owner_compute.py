"""Optimizers of whole matrices under fsdp_native, whose ranks hold runs of elements: updated on their owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.training.whole_matrices import (
    OwnMuon,
    assert_same_steps,
    make_muon,
    plain_steps,
    steps_on,
)
from fsdp_core.testing.training import new_fabric

MATRICES = 7  # of the net: its tied pair, and two in each block


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_matrix_is_updated_on_one_rank(ranks: RankPool, world_size: int) -> None:
    got: list[Any] = ranks.run(world_size, steps_on, "fsdp_native", world_size, 0, 3)
    for of_rank in got:
        assert_same_steps(of_rank, plain_steps(3))
    matrices = [count for *_, count in got]
    assert sum(matrices) == 3 * MATRICES
    assert max(matrices) <= 3 * -(-MATRICES // world_size)


class LooksAtAll(OwnMuon):
    """Scales updates by the norm of all gradients that it sees."""

    def _update(self, group: Any, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        norms = [p.grad.norm() for one in self.param_groups for p in one["params"] if p.grad is not None]
        return super()._update(group, parameter, state) * 100 / (1 + sum(float(n) for n in norms))


def refused() -> tuple[str, str]:
    told = []
    for options, kind in (({}, LooksAtAll), ({"use_orig_params": False, "auto_wrap_policy": None}, OwnMuon)):
        fabric, net = new_fabric("fsdp_native", options=options), oracle.new_net()
        net.requires_grad_(True)
        groups = [{"params": list(net.parameters())}] if options else make_muon(net).param_groups
        optimizer = kind([{"params": group["params"], "use_muon": False} for group in groups])
        if options:
            optimizer = torch.optim.Adafactor(net.parameters())  # type: ignore[assignment]
        told.append(refusal(OptimizerMismatchError, lambda f=fabric, n=net, o=optimizer: f.setup(n, o)))  # type: ignore[misc]
    return told[0], told[1]


def test_optimizers_that_owners_cannot_run_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """One whose update depends on other parameters too; and any over flat parameters of several of the user's."""
    for looks_at_all, over_flat in ranks.run(2, refused):
        assert_says(looks_at_all, "LooksAtAll looks at more of a parameter", "Use an optimizer whose update is")
        assert_says(over_flat, "Adafactor looks at more of a parameter", "Use an optimizer whose update is")
