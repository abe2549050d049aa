"""Buckets are reduced while the backward pass goes on, in one order on all ranks, and their gradients are freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_core.sharding import sharded_of
from fsdp_core.testing import RankPool, new_fabric

LAYERS = 8


class Net(nn.Module):
    """Layers of a bucket each, of which rank 1 leaves out the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, layers: int) -> Any:
        for layer in self.layers[:layers]:
            x = layer(x)
        return x


def most_whole_gradients(leaves_out: int) -> tuple[int, int]:
    """The most whole gradients that were held at once on this rank, and how many shards have one afterwards."""
    fabric = new_fabric("zero2", 2)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sharded: Any = sharded_of(net)
    held: list[int] = []

    def count(layer: nn.Module, *_: Any) -> None:
        with sharded.own_gradients():
            held.append(sum(p.grad is not None for p in sharded.whole.values()))

    for layer in net.layers:
        layer.register_full_backward_pre_hook(count)
    output = model(torch.ones(2, 32, requires_grad=True), LAYERS - leaves_out * fabric.global_rank)
    fabric.backward(output.sum())
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    return max(held), sum(p.grad is not None for p in shards)


def test_gradients_are_freed_in_the_pass(ranks: RankPool) -> None:
    assert ranks.run(2, most_whole_gradients, 0) == [(0, LAYERS)] * 2


def test_a_rank_that_leaves_out_a_layer_reduces_in_the_same_order(ranks: RankPool) -> None:
    (first, *_), (second, *_) = told = ranks.run(2, most_whole_gradients, 1)
    assert [reduced for _, reduced in told] == [LAYERS] * 2
    assert (first, second) == (0, LAYERS - 2)  # rank 1's last bucket is the first, so that all wait for its end
