"""What modules keep of their activations, in one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import check_saved_ops, checkpoint_activations, offload_activations
from fsdp_core.testing import oracle
from fsdp_core.testing.refusals import assert_says, refusal

MM = torch.ops.aten.mm


@pytest.mark.parametrize(("policy", "chosen"), [("every_1", [0, 1, 2]), ("every_2", [1]), ("every_3", [2])])
def test_of_n_blocks_the_last_one_recomputes(policy: str, chosen: list[int]) -> None:
    net = oracle.new_net()
    assert checkpoint_activations(net, policy) == len(chosen)
    assert [i for i, block in enumerate(net.blocks) if "forward" in vars(block)] == chosen


@pytest.mark.parametrize("policy", ["every_0", "every_", "every_-1", "every_4", "auto", "Block"])
def test_policy_that_chooses_nothing(policy: str) -> None:
    told = refusal(ShardingError, lambda: checkpoint_activations(oracle.new_net(), policy))
    assert_says(told, f"activation_checkpointing_policy={policy!r}", "'every_2' for every second")


@pytest.mark.parametrize("saved", ["aten.mm", "torch.ops.aten.mm", MM])
def test_operator_by_name(saved: Any) -> None:
    assert MM.default in check_saved_ops([saved], "saves")
    assert check_saved_ops([MM.default, "aten.mm.out"], "saves") == [MM.default, MM.out]


@pytest.mark.parametrize("saved", [[], "aten.mm", ["mm"], ["aten.mm.defualt"], ["aten"], [3], 3, MM, [nn.Linear]])
def test_no_operator(saved: Any) -> None:
    told = refusal(UnsupportedCapabilityError, lambda: check_saved_ops(saved, "saves"))
    assert_says(told, "saves", "['aten.mm', 'aten.addmm']")


def test_offloaded_are_activations_and_no_parameters() -> None:
    packed: list[Tensor] = []

    class Watched(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor), pack(tensor))[1]

    block, plain = oracle.Block(), oracle.Block()
    plain.load_state_dict(block.state_dict())
    offload_activations([block, block], pin_memory=False)
    of = copy.deepcopy(block)
    x = torch.randn(3, oracle.FEATURES, generator=torch.Generator().manual_seed(1))
    with mock.patch("fsdp_core.sharding.units.activations.save_on_cpu", Watched):
        for module in (block, of, plain):
            module(x).square().sum().backward()
    for module in (block, of):
        parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert packed
        assert not parameters & {tensor.untyped_storage().data_ptr() for tensor in packed}
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
