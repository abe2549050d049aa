"""Plans say all that is about to happen to a module, change nothing, and are the same wherever its parameters are."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.plan import ParameterPlan, ShardingPlan, plan_module
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.sharded import sharded_of
from fsdp_core.sharding.units.wrap_policy import checkpoint_activations, select_recomputed, select_units
from fsdp_core.testing.loopback.backend import LoopbackBackend


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)


def plan(module: nn.Module) -> ShardingPlan:
    return plan_module(
        module,
        {"backend": "Mine"},
        units=lambda module: select_units(module, "auto"),
        replicated=lambda module: [parameter for parameter in module.parameters() if parameter.ndim == 0],
        details=lambda module, units: {"depth": {"blocks.0": len(units)}},
    )


def test_parameters_units_and_ties_are_planned() -> None:
    made = plan(Net())
    assert made.units == ("blocks.0", "blocks.1")
    assert made.parameters["blocks.1.linear.weight"] == ParameterPlan(
        shape=(4, 4), dtype=torch.float32, requires_grad=True, unit="blocks.1"
    )
    assert made.parameters["head.weight"].tied_to == "embedding.weight"
    assert made.ties() == [["embedding.weight", "head.weight"]]
    assert [name for name, parameter in made.parameters.items() if parameter.is_replicated] == ["scale"]
    assert made.numel == 6 * 4 + 2 * (16 + 8) + 1
    assert made.nbytes == 4 * made.numel
    assert [made.has_parameters(name) for name in ("", "blocks", "blocks.0.norm", "blocks.0.dropout")] == [True] * 3 + [
        False
    ]


def test_what_ranks_compare_is_all_of_it() -> None:
    facts = plan(Net()).describe()
    assert facts["parameter 'scale'"] == "() in torch.float32, frozen, whole on every rank"
    assert facts["parameter 'head.weight'"] == "tied to 'embedding.weight'"
    assert facts["buffer 'blocks.0.norm.running_mean'"] == "(4,) in torch.float32"
    assert facts["layer 'blocks.0.linear'"] == "Linear(in_features=4, out_features=4, bias=False)"
    assert facts["class of the module"] == "Net"
    assert facts["units of sharding"] == "blocks.0, blocks.1"
    assert facts["depth of 'blocks.0'"] == "2"


def test_it_is_the_same_on_the_meta_device_and_plain_data() -> None:
    with torch.device("meta"):
        on_meta = plan(Net())
    assert on_meta == plan(Net())
    assert on_meta.describe() == plan(Net()).describe()
    assert pickle.loads(pickle.dumps(on_meta)) == on_meta
    with pytest.raises(dataclasses.FrozenInstanceError):
        on_meta.units = ()  # type: ignore[misc]


def test_units_own_what_no_unit_in_them_has() -> None:
    net = Net()
    first, second, root = plan(net).split_by_unit(net)
    assert (first.module, second.module, root.module) == (net.blocks[0], net.blocks[1], net)
    assert root.parameters() == {net.scale, net.embedding.weight}
    assert root.replicated() == {net.scale}
    assert not first.replicated()
    net.scale = nn.Parameter(torch.tensor(3.0))  # as where it gets memory
    assert root.replicated() == {net.scale}


def test_what_recomputes_is_chosen_once_and_compared() -> None:
    """A policy may answer otherwise when it is asked again, or on another rank, whose gathering would not match."""
    answers = iter([False, False, False, False, True, False, False, True, False])
    net = Net()
    made = plan_module(
        net,
        {},
        units=lambda module: [],
        recomputed=lambda module: select_recomputed(module, lambda submodule: next(answers)),
    )
    assert made.recomputed == ("blocks.0.linear", "blocks.1.linear")
    assert made.describe()["recomputed activations"] == "blocks.0.linear, blocks.1.linear"
    assert checkpoint_activations(net, made) == 2
    assert next(answers, None) is None


def refuse(*_: object) -> None:
    raise ShardingError("matches nothing")


@pytest.mark.parametrize("asked", ["check", "units", "replicated", "recomputed", "details", "local_numels"])
def test_a_refusal_is_planned_and_raised_by_the_set_up(asked: str) -> None:
    made = plan_module(Net(), {"backend": "Mine"}, **{"units": lambda module: [], asked: refuse})  # type: ignore[arg-type]
    facts = made.describe()
    assert facts.pop("state") == "ShardingError: matches nothing"
    assert facts["parameter 'head.weight'"] == "tied to 'embedding.weight'"  # what ranks differ in is said first
    assert facts["units of sharding"] == "the whole alone"
    assert (made.class_name, made.config) == ("Net", {"backend": "Mine"})
    backend = LoopbackBackend()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    net = Net()
    with pytest.raises(ShardingError, match="matches nothing"):
        backend.shard(net, made)
    assert sharded_of(net) is None


class Unnamed(nn.Linear):
    def named_parameters(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError(f"no names of {object()}")


def new_spoiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    del layer.in_features  # which its extra_repr() shows
    return nn.Sequential(layer)


@pytest.mark.parametrize("build", [lambda: Unnamed(2, 2), new_spoiled])
def test_a_module_that_cannot_be_described_is_refused(build: Callable[[], nn.Module]) -> None:
    """An error that was raised while one rank plans would leave the others waiting."""
    kept = [build(), build()]
    first, second = (plan(module) for module in kept)
    assert isinstance(first.refusal, RuntimeError | AttributeError)
    assert first.describe() == second.describe(), "the message has an address"


def test_collections_of_parameters_are_described_without_their_device() -> None:
    """Ranks differ in it: rank 0 may have loaded the weights, and each has a GPU of its own."""

    def build() -> nn.Module:
        listed = nn.ParameterList([nn.Parameter(torch.ones(2))])
        return nn.ModuleDict({"listed": listed, "named": nn.ParameterDict({"scale": nn.Parameter(torch.ones(3))})})

    with torch.device("meta"):
        on_meta = plan(build())
    assert on_meta == plan(build())
    assert list(on_meta.parameters) == ["listed.0", "named.scale"]


class PartlyNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return ((name, p) for name, p in super().named_parameters(*args, **options) if name.startswith("adapter"))


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (PartlyNamed, "'base.weight' is not among the named_parameters() of PartlyNamed"),
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))), "'0' of Sequential is a TopLevel"),
    ],
)
def test_parameters_that_cannot_be_replaced_are_planned_to_be_refused(
    build: Callable[[], nn.Module], part: str
) -> None:
    backend = LoopbackBackend()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    assert part in str(backend.plan(build()).refusal)


def test_a_module_that_contains_itself_is_planned_to_be_refused() -> None:
    net: Any = Net()
    net.blocks[0].parent = net
    refusal = plan(net).refusal
    assert isinstance(refusal, ShardingError)
    assert str(refusal).startswith("'blocks.0.parent' of Net is the Net that it is in, so that module.train(), ")


def test_a_module_in_two_places_contains_not_itself() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.Sequential(shared, nn.Sequential(shared)))
    assert plan(net).refusal is None


def test_a_lazy_module_is_planned_to_be_refused() -> None:
    backend = LoopbackBackend()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    made = backend.plan(nn.LazyLinear(2))
    assert "'weight' belongs to a lazy module" in str(made.refusal)
    assert made.describe()["class of the module"] == "LazyLinear(in_features=0, out_features=2, bias=True)"


def freeze(net: Any) -> None:
    net.head.weight.requires_grad_(False)


def add_layer(net: Any) -> None:
    net.dropout = nn.Dropout()


def resize(net: Any) -> None:
    net.scale = nn.Parameter(torch.ones(3))


def tie(net: Any) -> None:
    net.blocks[1].linear.weight = net.blocks[0].linear.weight


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (freeze, "'embedding.weight' was (6, 4) in torch.float32, trained, and is (6, 4) in torch.float32, frozen"),
        (add_layer, "layer 'dropout' was not there, and is Dropout(p=0.5, inplace=False)"),
        (resize, "parameter 'scale' was ()"),
        (tie, "'blocks.1.linear.weight' was (4, 4) in torch.float32, trained, and is tied to 'blocks.0.linear.weight'"),
        (nn.Module.double, "parameter 'scale' was () in torch.float32, frozen, and is () in torch.float64, frozen"),
    ],
)
def test_a_module_that_was_changed_after_its_plan_is_refused(change: Callable[[nn.Module], Any], part: str) -> None:
    net, backend = Net(), LoopbackBackend()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    made = backend.plan(net)
    change(net)
    with pytest.raises(ShardingError, match="Net is not as it was planned: its ") as refused:
        backend.shard(net, made)
    assert part in str(refused.value)
    assert sharded_of(net) is None


def test_a_plan_is_not_for_other_settings_or_modules() -> None:
    backend, net = LoopbackBackend(), Net()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    made = backend.plan(net)
    with pytest.raises(ShardingError, match="Block is not as it was planned: its parameter"):
        backend.shard(Block(), made)
    backend.bind(ProcessGroupRuntime(), ShardPrecision(name="bf16-true", storage=torch.bfloat16))
    with pytest.raises(ShardingError, match="setting 'precision' was"):
        backend.shard(net, made)


def test_a_sharded_module_is_not_planned_again() -> None:
    backend, net = LoopbackBackend(), Net()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    sharded = backend.shard(net)
    made = backend.plan(net)
    assert "Net is sharded already" in str(made.refusal)
    assert backend.shard(net, made) is sharded


def test_to_plan_changes_nothing() -> None:
    net, backend = Net(), LoopbackBackend()
    backend.bind(ProcessGroupRuntime(), ShardPrecision())
    before = {name: id(value) for name, value in (*net.named_parameters(), *net.named_buffers())}
    state = copy.deepcopy(net.state_dict())
    made = backend.plan(net)
    assert before == {name: id(value) for name, value in (*net.named_parameters(), *net.named_buffers())}
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert not any(vars(module).get("_fsdp_core_sharded") for module in net.modules())
    sharded = backend.shard(net, made)
    assert sharded.plan is made
    assert sharded.user_modules["blocks.0"] is net.blocks[0]
