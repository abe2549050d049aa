"""A copy of a sharded module is a plain module."""

from __future__ import annotations

import copy

import torch
from both_examples import of_both
from torch import nn

from fsdp_core.testing import RankPool, new_fabric


def of_a_copy(strategy: str) -> tuple[bool, bool]:
    """Whether a copy has gradients after a backward pass on one rank alone, and whether the module has any."""
    fabric = new_fabric(strategy, 2)
    net = nn.Linear(4, 4)
    _, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    copied = copy.deepcopy(net)
    if fabric.global_rank == 0:
        copied(torch.ones(2, 4)).sum().backward()
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    return copied.weight.grad is not None, any(p.grad is not None for p in (*net.parameters(), *shards))


@of_both
def test_a_copy_computes_by_itself(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(2, of_a_copy, strategy) == [(True, False), (False, False)]
