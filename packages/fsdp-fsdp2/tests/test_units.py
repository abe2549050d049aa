"""Modules that can't be units as they are, how units are offloaded, and what of torch's is done faster for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import wrap as torch_wrap

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.training import new_fabric


class Registered(nn.Module):
    """Of a base that knows its subclasses by name, refuses attributes, and ends in its own way."""

    by_name: ClassVar[dict[str, type]] = {}
    ended: ClassVar[list[str]] = []

    def __init__(self) -> None:
        vars(self)["is_frozen"] = False
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __init_subclass__(cls) -> None:
        Registered.by_name[cls.__name__] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        assert not self.is_frozen
        super().__setattr__(name, value)

    def __del__(self) -> None:
        self.ended.append(type(self).__name__)


class RegisteredBlock(Registered):
    pass


def plan_registered() -> tuple[str, bool, list[str]]:
    net = nn.Sequential(RegisteredBlock(), RegisteredBlock())
    plan = new_fabric("fsdp2", 1).strategy.backend.plan(net)
    return str(plan.refusal), Registered.by_name == {"RegisteredBlock": RegisteredBlock}, Registered.ended


def test_to_plan_is_not_noticed_by_classes(ranks: RankPool) -> None:
    assert ranks.run(1, plan_registered) == [("None", True, [])]


def refused() -> list[str]:
    fabric = new_fabric("fsdp2", 2)
    with mark_by_torch_wrap():
        of_options = nn.Sequential(torch_wrap(nn.Linear(2, 2), reshard_after_forward=False))
    of_dtypes = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    return [
        refusal(UnsupportedCapabilityError, lambda: fabric.setup(of_options)),
        refusal(ShardingError, lambda: fabric.setup(of_dtypes)),
        str(fabric.strategy.backend.plan(of_dtypes).refusal),
    ]


def test_modules_that_cannot_be_units(ranks: RankPool) -> None:
    for of_options, of_dtypes, planned in ranks.run(2, refused):
        assert planned == of_dtypes
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

        def note(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(names[parameters[0]._module_info.module])
            return reduce(parameters, *args, **kwargs)

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


class Pair(nn.Sequential):
    """Two layers, which become a unit."""


def new_pairs() -> nn.Sequential:
    with oracle.seeded(0):
        return nn.Sequential(*(Pair(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)), nn.Linear(6, 1))


def of_fabric(fabric: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = new_pairs()
    set_up: tuple[nn.Module, torch.optim.Optimizer] = fabric.setup(net, oracle.sgd(net))
    return set_up


def by_hand(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = new_pairs()
    for pair in net[:-1]:
        fully_shard(pair, **options)
    fully_shard(net, **options)
    return net, oracle.sgd(net)


def stepped(net: Any, optimizer: Any, backward: Callable[[torch.Tensor], None], steps: int) -> list[float]:
    """The losses of a few steps."""
    losses = []
    for step in range(steps):
        loss = net(torch.full((2, 6), 0.1 * step)).float().square().mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def named_for_profilers() -> tuple[set[str], set[str], int]:
    """What a profiler sees of a step under Fabric and of one by hand, and how often torch names something without."""
    fabric = new_fabric("fsdp2", 2, {"auto_wrap_policy": {Pair}})
    trained, seen = of_fabric(fabric), []
    for (net, optimizer), backward in ((trained, fabric.backward), (by_hand(), torch.Tensor.backward)):
        stepped(net, optimizer, backward, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            stepped(net, optimizer, backward, 1)
        seen.append({event.key for event in profiler.key_averages()})
    named = mock.Mock(side_effect=torch.profiler.record_function)
    with mock.patch.object(_fsdp_param_group, "record_function", named):
        stepped(*trained, fabric.backward, 1)
    ours, theirs = ({name for name in names if name.startswith("FSDP::")} for names in seen)
    return ours, theirs, named.call_count


def test_profilers_see_the_names_that_torch_gives(ranks: RankPool) -> None:
    for ours, theirs, without in ranks.run(2, named_for_profilers):
        assert ours == theirs
        assert any("FSDP::post_backward_reduce" in name for name in ours)
        assert without == 0


#: Options of units that are sharded over one rank, and whether they are gathered by one copy of all parameters.
COPIED = {"mixed": ({}, True), "offloaded": ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, False)}


def on_one_rank() -> dict[str, tuple[list[float], list[float], int]]:
    """The losses of steps under Fabric and by hand, and how many units were gathered by one copy."""
    found = {}
    for case, (options, _) in COPIED.items():
        fabric = new_fabric("fsdp2", 1, {"auto_wrap_policy": {Pair}, **options}, precision="bf16-mixed")
        trained = of_fabric(fabric)
        copied = mock.Mock(side_effect=torch._foreach_copy_)
        with mock.patch.object(torch, "_foreach_copy_", copied):
            ours = stepped(*trained, fabric.backward, 4)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        theirs = stepped(*by_hand(mp_policy=policy), torch.Tensor.backward, 4)
        found[case] = ours, theirs, copied.call_count
    return found


def test_units_of_one_rank_are_gathered_by_one_copy(ranks: RankPool) -> None:
    [found] = ranks.run(1, on_one_rank)
    for case, (ours, theirs, copied) in found.items():
        assert ours == theirs, case
        assert (copied > 0) == COPIED[case][1], case


class Tied(nn.Module):
    """Two layers of one weight, and notes of what is set at the module by torch."""

    def __init__(self, *, notes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NotingLinear(6, 6) if notes else nn.Linear(6, 6) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.same: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        self.same.append(first.weight is second.weight and first.weight.numel() == 36)
        out: torch.Tensor = second(first(x))
        return out


class NotingLinear(nn.Linear):
    """A layer that sets attributes in a way of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.times = getattr(self, "times", 0) + 1


def tied_in_units() -> list[tuple[list[bool], bool, bool]]:
    """By how modules set attributes: whether they hold one weight in steps, hold one after, and have set it."""
    found = []
    for notes in (False, True):
        fabric = new_fabric("fsdp2", 2, {"auto_wrap_policy": {Tied}})
        net = nn.Sequential(Tied(notes=notes), nn.Linear(6, 6))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        of: Any = net[0]
        before = getattr(of.layers[0], "times", 0)
        for _ in range(3):
            fabric.backward(model(torch.ones(2, 6)).square().mean())
            optimizer.step()
        first, second = of.layers
        found.append((of.same, first.weight is second.weight, getattr(first, "times", 0) > before))
    return found


def test_modules_hold_what_is_gathered_and_shards(ranks: RankPool) -> None:
    for plain, noting in ranks.run(2, tied_in_units):
        assert plain == ([True] * 3, True, False)
        assert noting == ([True] * 3, True, True)
