"""Optimizers of whole matrices under fsdp_native, whose ranks hold runs of elements: updated on their owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import full_state_dict
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.suite.training.whole_matrices import OwnMuon, assert_same_steps, make_muon, plain_steps, steps_on
from fsdp_core.testing.training import new_fabric, whole_batches
from native_runs import set_up

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


class FailsOnOneRank(OwnMuon):
    """Can't step over no parameters, on one rank alone."""

    def step(self, closure: Any = None) -> Any:
        if torch.distributed.get_rank() == 1 and not any(group["params"] for group in self.param_groups):
            raise RuntimeError("nothing to step over")
        return super().step(closure)


def refused() -> list[str]:
    told = []
    flat = {"use_orig_params": False, "auto_wrap_policy": None}
    for options, kind in (({}, LooksAtAll), (flat, OwnMuon), ({}, FailsOnOneRank)):
        fabric, net = new_fabric("fsdp_native", options=options), oracle.new_net()
        net.requires_grad_(True)
        groups = [{"params": list(net.parameters())}] if options else make_muon(net).param_groups
        whole = kind is FailsOnOneRank
        optimizer = kind([{"params": one["params"], "use_muon": whole and one["use_muon"]} for one in groups])
        if options:
            optimizer = torch.optim.Adafactor(net.parameters())  # type: ignore[assignment]
        told.append(refusal(OptimizerMismatchError, lambda f=fabric, n=net, o=optimizer: f.setup(n, o)))  # type: ignore[misc]
    return told


def test_optimizers_that_owners_cannot_run_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """One whose update depends on other parameters too; any over flat parameters of several; on all ranks alike."""
    for looks_at_all, over_flat, on_one in ranks.run(2, refused):
        assert_says(on_one, "FailsOnOneRank looks at more of a parameter")
        assert_says(looks_at_all, "LooksAtAll looks at more of a parameter", "Use an optimizer whose update is")
        assert_says(over_flat, "Adafactor looks at more of a parameter", "Use an optimizer whose update is")


class Remembers(torch.optim.SGD):
    """Steps by the mean of the last gradients, which it keeps in a list, beside a pair in a dict."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["past"] = [*state.get("past", []), parameter.grad.clone()][-2:]
                state["kept"] = {"pair": (state["past"][0].clone(), len(state["past"]))}
                parameter.grad.copy_(torch.stack(state["past"]).mean(0) + 0.1 * state["kept"]["pair"][0])
        return super().step(closure)


def new_optimizer(net: nn.Module) -> Remembers:
    return Remembers(net.parameters(), lr=0.1)


def remembered(folder: str, world_size: int, first: int, last: int) -> dict[str, Tensor]:
    fabric, _, model, optimizer = set_up(net=two_layers(), optimizer=new_optimizer, world_size=world_size)
    if first:
        fabric.load(folder, {"model": model, "optimizer": optimizer})
    run_steps(model, optimizer, whole_batches(fabric, last)[first:], fabric.backward)
    if not first:
        fabric.save(folder, {"model": model, "optimizer": optimizer})
    return full_state_dict(model)


def two_layers() -> nn.Module:
    with oracle.seeded(5):
        return nn.Sequential(nn.Linear(oracle.FEATURES, 5), nn.Tanh(), nn.Linear(5, oracle.FEATURES))


def test_state_in_containers_is_resumed_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(2, remembered, folder, 2, 0, 3)
    _, want = oracle.train_plain(5, new_optimizer, net=two_layers())
    for world_size in (1, 3):
        first, *_ = ranks.run(world_size, remembered, folder, world_size, 3, 5)
        torch.testing.assert_close(first, want, atol=FP32_TOLERANCE, rtol=0)
