"""What handles of flat parameters do in less time than torch's, and what they leave to torch's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.short_runs import assert_close_by_name, run_steps
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import own_share
from native_runs import set_up

#: What torch's handles do for each parameter, and ours in less time where they can.
METHODS = ("_writeback_orig_params", "_use_sharded_views")


def count_calls(calls: Counter[str]) -> None:
    for name in METHODS:
        original = getattr(FlatParamHandle, name)

        def count(self: Any, name: str = name, original: Any = original) -> Any:
            calls[name] += not self.flat_param._shared_param_infos  # tied parameters are left to torch
            return original(self)

        setattr(FlatParamHandle, name, count)


def halve(net: nn.Module, *, in_place: bool) -> None:
    """Change parameters between two steps, in their memory or by giving them other memory."""
    for parameter in net.parameters():
        if in_place:
            with torch.no_grad():
                parameter.mul_(0.5)
        else:
            parameter.data = parameter.data * 0.5


def train_halved(options: dict[str, Any], in_place: bool) -> tuple[dict[str, torch.Tensor], list[Counter[str]]]:
    fabric, net, model, optimizer = set_up(options)
    calls: Counter[str] = Counter()
    count_calls(calls)
    counts = []
    for batch in oracle.global_batches(4):
        calls.clear()
        halve(net, in_place=in_place)
        run_steps(model, optimizer, [own_share(fabric, batch)], fabric.backward)
        counts.append(Counter(calls))
    return full_state(fabric.strategy), counts


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}], ids=["sharded", "whole"])
@pytest.mark.parametrize("in_place", [True, False], ids=["same memory", "other memory"])
def test_parameters_with_other_memory_are_left_to_torch(
    ranks: RankPool, options: dict[str, Any], in_place: bool
) -> None:
    net = oracle.new_net()
    optimizer = oracle.sgd(net)
    for batch in oracle.global_batches(4):
        halve(net, in_place=True)
        run_steps(net, optimizer, [batch])
    for state, counts in ranks.run(2, train_halved, options, in_place):
        assert_close_by_name(state, net.state_dict())
        writes_back, uses_views = (max(count[name] for count in counts[1:]) > 0 for name in METHODS)
        assert writes_back == (not in_place), counts
        # where there are shards, those that were assigned to are in the flat shard again before FSDP1 makes views of it
        assert uses_views == (not in_place and "sharding_strategy" in options), counts


class Noting(nn.Linear):
    """Notes what is set in it."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("noted", Counter())[name] += 1
        super().__setattr__(name, value)


def noted_in_a_step() -> tuple[int, int]:
    options = {"auto_wrap_policy": {Noting, nn.Linear}}
    fabric, net, model, optimizer = set_up(options, net=nn.Sequential(Noting(4, 4), nn.Linear(4, 4)))
    layer: Any = net[0]
    while not isinstance(layer, Noting):
        layer = layer.module
    registered: list[str] = []
    hook = register_module_parameter_registration_hook(lambda module, name, value: registered.append(name))
    layer.noted.clear()
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    hook.remove()
    return layer.noted["weight"], registered.count("weight")


def test_what_observes_modules_sees_what_is_set(ranks: RankPool) -> None:
    for in_module, in_all in ranks.run(2, noted_in_a_step):
        assert in_module > 0
        assert in_all > 0
