"""Modules that can't be units as they are, and how units are offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import wrap as torch_wrap

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.training import new_fabric


def refused() -> list[str]:
    fabric = new_fabric("fsdp2", 2)
    with mark_by_torch_wrap():
        of_options = nn.Sequential(torch_wrap(nn.Linear(2, 2), reshard_after_forward=False))
    of_dtypes = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    return [
        refusal(UnsupportedCapabilityError, lambda: fabric.setup(of_options)),
        refusal(ShardingError, lambda: fabric.setup(of_dtypes)),
    ]


def test_modules_that_cannot_be_units(ranks: RankPool) -> None:
    for of_options, of_dtypes in ranks.run(2, refused):
        assert_says(of_options, "wrap(0, reshard_after_forward=...)", "whole model", "write wrap(module)")
        assert_says(of_dtypes, "one unit of sharding, ", "'0.bias' in torch.float32", "'1.bias' in torch.float64")
        assert_says(of_dtypes, "Convert them to one dtype", "auto_wrap_policy")


def offloaded() -> list[tuple[bool, bool]]:
    """For some values of the option, whether the shards are offloaded, and the model is what it was."""
    found = []
    for policy in (CPUOffloadPolicy(pin_memory=False), OffloadPolicy(), True, False):
        fabric = new_fabric("fsdp2", 2, {"cpu_offload": policy})
        net = oracle.new_net()
        fabric.setup(net)
        root: Any = sharded_by(fabric.strategy).root
        kept = root._get_fsdp_state()._fsdp_param_group.offload_policy
        want, state = oracle.new_net().state_dict(), full_state(fabric.strategy)
        same = all(torch.equal(state[name], tensor) for name, tensor in want.items())
        found.append((isinstance(kept, CPUOffloadPolicy), same))
    return found


def test_offload_policies_of_torch(ranks: RankPool) -> None:
    want = [(True, True), (False, True), (True, True), (False, True)]
    assert ranks.run(2, offloaded) == [want] * 2


def reductions() -> tuple[list[str], list[str]]:
    """The order in which gradients are reduced if two layers are sharded together: under Fabric, and by hand."""

    def order(net: nn.Module, backward: Callable[[torch.Tensor], None]) -> list[str]:
        names = {module: name for name, module in net.named_modules()}
        found: list[str] = []
        reduce = _fsdp_param_group.foreach_reduce

        def note(parameters: Any, *args: Any) -> Any:
            found.append(names[parameters[0]._module_info.module])
            return reduce(parameters, *args)

        with mock.patch.object(_fsdp_param_group, "foreach_reduce", note):
            backward(net(torch.ones(2, 6)).square().mean())
        return found

    def new_net() -> nn.Sequential:
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        fully_shard(net[0])
        fully_shard([net[2], net[3]])
        return net

    fabric, net, by_hand = new_fabric("fsdp2", 2), new_net(), new_net()
    fabric.setup(net)
    fully_shard(by_hand)
    return order(net, fabric.backward), order(by_hand, torch.Tensor.backward)


def test_modules_sharded_together_are_reduced_when_torch_does(ranks: RankPool) -> None:
    """They were taken for called twice, and their gradients waited for the end of the backward pass."""
    for ours, by_hand in ranks.run(2, reductions):
        assert ours == by_hand
        assert ours[0] == "2"
