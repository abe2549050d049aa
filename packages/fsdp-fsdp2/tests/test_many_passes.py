"""Steps of several passes gather and reduce as torch does by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.collectives import Layer, count_in_steps, new_layers
from fsdp_core.testing.training import new_fabric


def counted() -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    fabric = new_fabric("fsdp2", 2, {"auto_wrap_policy": {Layer}})
    nets = [new_layers(), new_layers()]
    of_fabric = [fabric.setup(net, oracle.sgd(net))[0] for net in nets]
    by_hand = [sharded_by_hand(new_layers()) for _ in nets]
    return count_in_steps(of_fabric, fabric.backward), count_in_steps(by_hand, torch.Tensor.backward)


def sharded_by_hand(net: nn.Module) -> nn.Module:
    for layer in net.children():
        if isinstance(layer, Layer):
            fully_shard(layer)
    fully_shard(net)
    return net


def test_steps_of_many_passes_communicate_as_by_hand(ranks: RankPool) -> None:
    for counts, by_hand in ranks.run(2, counted):
        assert counts["gradient of an input"][1] == 0
        for name in ("plain", "two networks"):
            (gathers, reductions), (gathers_by_hand, reductions_by_hand) = counts[name], by_hand[name]
            assert reductions == reductions_by_hand > 0, name
            assert 0 < gathers <= gathers_by_hand, name  # the last unit stays gathered for its backward pass
