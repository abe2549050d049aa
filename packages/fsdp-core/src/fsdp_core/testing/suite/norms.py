"""Norms of gradients: of any order, and of what one of several optimizers holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.clauses import Clauses, requires
from fsdp_core.testing.suite.numbers import assert_same
from fsdp_core.testing.suite.parameters import own_share
from fsdp_core.testing.training import new_fabric

__all__ = ["NormsSuite"]

#: Small enough to clip, of any order.
MAX_NORM = 0.1


def _halves(net: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two optimizers: of the blocks, and of what is around them, which has the larger gradient."""
    around = [net.inp.weight]  # tied with the output's
    return oracle.momentum(net.blocks), torch.optim.SGD(around, lr=0.05, momentum=0.9)


def _plain(order: float) -> tuple[list[float], dict[str, Tensor]]:
    net = oracle.new_net()
    optimizers = _halves(net)
    x, y = oracle.global_batches(1)[0]
    mse_loss(net(x), y).backward()
    norms = []
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(held, MAX_NORM, norm_type=order)))
    for optimizer in optimizers:
        optimizer.step()
    return norms, net.state_dict()


def _clipped(strategy: str, order: float) -> tuple[list[float], dict[str, Tensor]]:
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, *optimizers = fabric.setup(net, *_halves(net))
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    fabric.backward(mse_loss(model(x), y))
    clip: dict[str, Any] = {"max_norm": MAX_NORM, "norm_type": order}
    norms: list[Any] = [fabric.clip_gradients(model, optimizer, **clip) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step()
    return [float(norm) for norm in norms], full_state(fabric.strategy)


class NormsSuite(Clauses):
    """Each optimizer's gradients are clipped by their own norm."""

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
    def test_each_optimizer_is_clipped_by_itself(self, ranks: Ranks, order: float) -> None:
        """The norms that are returned, and the weights after a step with what was clipped."""
        want_norms, want = _plain(order)
        got = ranks.run(2, _clipped, self.strategy, order)
        for norms, _ in got:
            assert norms == pytest.approx(want_norms, rel=FP32_TOLERANCE)
        assert_same([([], state) for _, state in got], ([], want))
