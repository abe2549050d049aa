"""Which submodules are units: those that a policy chooses, and those that are marked by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as torch_wrap

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.wrap import mark_by_torch_wrap, marked, options_of, when_marked
from fsdp_core.sharding.units.wrap_policy import checkpoint_activations, repeated_blocks, select_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def listed(*members: nn.Module) -> nn.Module:
    return nn.ModuleDict({"members": nn.ModuleList(members), "head": nn.Linear(2, 1)})


def chained(*members: nn.Module) -> nn.Module:
    return nn.ModuleDict({"members": nn.Sequential(*members), "head": nn.Linear(2, 1)})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (listed(Block(), Block(), Block()), [0, 1, 2]),
        (listed(nn.Linear(2, 2), nn.Linear(2, 2)), [0, 1]),
        (listed(Block(), nn.Linear(2, 2), Block()), [0, 2]),
        (listed(nn.Linear(2, 2)), []),
        (chained(Block(), Block()), [0, 1]),
        (chained(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),
        (listed(torch.compile(Block(), backend="eager"), torch.compile(Block(), backend="eager")), [0, 1]),
    ],
    ids=["blocks", "layers in a list", "two of a kind", "one", "chained blocks", "chained layers", "compiled"],
)
def test_auto(model: nn.ModuleDict, expected: list[int]) -> None:
    members = [getattr(member, "_orig_mod", member) for member in model["members"]]
    assert repeated_blocks(model) == [members[i] for i in expected]


def test_auto_looks_at_a_root_that_is_a_chain() -> None:
    model = nn.Sequential(Block(), Block())
    assert repeated_blocks(model) == list(model)


def test_one_block_used_many_times_is_one_unit() -> None:
    block = Block()
    assert select_units(listed(block, block, block), "auto") == [block]


def test_innermost_first() -> None:
    units = select_units(listed(Block(), Block()), {Block, nn.Linear})
    assert [type(unit) for unit in units] == [nn.Linear, nn.Linear, Block, nn.Linear, nn.Linear, Block, nn.Linear]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        frozenset({Block}),
        [Block],
        (Block,),
        is_block,
        ModuleWrapPolicy({Block}),
        partial(size_based_auto_wrap_policy, min_num_params=10),
    ],
    ids=["set", "frozenset", "list", "tuple", "function", "torch's policy", "torch's by size"],
)
def test_policies_of_any_form(policy: Callable[..., bool]) -> None:
    model = listed(Block(), Block())
    assert select_units(model, policy) == list(model["members"])


@pytest.mark.parametrize(
    "policy",
    [
        always_wrap_policy,
        {nn.Linear},
        lambda module: True,
        ModuleWrapPolicy({nn.Linear}),
        partial(size_based_auto_wrap_policy, min_num_params=6),
    ],
    ids=["always", "class", "function", "torch's class", "size"],
)
def test_a_policy_may_choose_the_root_alone(policy: Any) -> None:
    assert select_units(nn.Linear(2, 2), policy) == []


@pytest.mark.parametrize(
    "policy",
    [{nn.Conv2d}, lambda module: False, partial(size_based_auto_wrap_policy, min_num_params=7)],
    ids=["class", "function", "size"],
)
def test_a_policy_that_chooses_nothing_is_refused(policy: Any) -> None:
    with pytest.raises(ShardingError, match="matches no submodule of Linear"):
        select_units(nn.Linear(2, 2), policy)


def block_called_as_another(module_name: str) -> type[nn.Module]:
    return type("Block", (nn.Linear,), {"__module__": module_name})


def test_classes_of_one_name_are_told_apart() -> None:
    theirs, again = block_called_as_another("theirs"), block_called_as_another("theirs")
    for option, apply in {
        "auto_wrap_policy": select_units,
        "activation_checkpointing_policy": checkpoint_activations,
    }.items():
        for present, words in {
            block_called_as_another("mine"): ": mine.Block.",
            again: ": theirs.Block (as it was before it was defined again: build the model anew).",
        }.items():
            net = nn.Sequential(present(2, 2), nn.ReLU())
            with pytest.raises(ShardingError) as refusal:
                apply(net, {theirs})  # type: ignore[operator]
            text = str(refusal.value)
            assert f"{option}={{theirs.Block}} matches no submodule of Sequential" in text
            assert f"Its submodules are of{words.removesuffix('.')}, ReLU." in text


def test_a_policy_may_be_the_path_of_a_function() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert checkpoint_activations(net, f"{__name__}.is_linear") == 1
    with pytest.raises(ShardingError, match="has no attribute 'is_nothing'"):
        checkpoint_activations(net, f"{__name__}.is_nothing")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_recomputation_is_set_up_once() -> None:
    model = listed(Block(), Block())
    assert checkpoint_activations(model, {Block}) == 2
    forward = model["members"][0].forward
    assert checkpoint_activations(model, {Block}) == 2
    assert model["members"][0].forward is forward


class WithBuffer(nn.Module):
    """A block whose output depends on a buffer that it writes to. The buffer begins as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.linear(x)) * (1 + self.remember(x.detach().mean(0)))
        return output

    def remember(self, mean: Tensor) -> Tensor:
        raise NotImplementedError


class LateBuffer(WithBuffer):
    """Registers its buffer at the first call."""

    mean: Tensor

    def remember(self, mean: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(2))
        return self.mean.lerp_(mean, 0.5).clone()


class SharedBuffer(WithBuffer):
    """Writes to a buffer that is a part of another, of a submodule, and reads that one."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_buffer("rows", torch.zeros(2, 2))
        self.register_buffer("row", self.linear.get_buffer("rows")[1])

    def remember(self, mean: Tensor) -> Tensor:
        self.row.lerp_(mean, 0.5)
        return self.linear.get_buffer("rows")[1].clone()


@pytest.mark.parametrize("block", [LateBuffer, SharedBuffer])
def test_recomputation_sees_buffers_as_the_first_time(block: type[WithBuffer]) -> None:
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = listed(block(), block())
        if recomputes:
            checkpoint_activations(model, {block})
        first, second = model["members"]
        x = torch.linspace(-1.0, 1.0, 6).view(3, 2)
        for _ in range(2):
            (second(first(x)).square().sum() + first(2 * x).sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((gradients, dict(model.named_buffers())))
    torch.testing.assert_close(results[1], results[0])


def test_blocks_that_contain_one_module_are_no_units() -> None:
    """Its parameters would be in the unit that is sharded first, and missing in the others."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(*(nn.Sequential(shared, nn.Linear(2, 2)) for _ in range(2)))
    assert select_units(model, lambda module: module in list(model)) == []
    around = nn.Sequential(model, nn.Linear(2, 2))
    assert select_units(around, lambda module: module is model) == [model]


# -- units marked by hand ---------------------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.ModuleDict({"body": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), "head": nn.Linear(2, 1)})


def test_wrap_returns_the_module_itself() -> None:
    linear = nn.Linear(2, 2)
    names = list(linear.state_dict())
    assert fsdp_core.wrap(linear) is linear
    assert list(linear.state_dict()) == names


@pytest.mark.parametrize(("policy", "expected"), [("auto", [1]), (None, [1]), ({nn.Linear}, [0, 1, 2])])
def test_marked_modules_are_units(policy: object, expected: list[int]) -> None:
    net = model()
    fsdp_core.wrap(net["body"][1])  # type: ignore[index]
    units = select_units(net, policy)  # type: ignore[arg-type]
    assert [i for i, block in enumerate(net["body"]) if any(unit is block for unit in units)] == expected  # type: ignore[index, arg-type]


def test_a_copy_keeps_its_marks() -> None:
    net = model()
    fsdp_core.wrap(net["head"])  # type: ignore[index]
    twin = copy.deepcopy(net)
    assert [m is twin["head"] for m in marked(twin)] == [True]  # type: ignore[index]


def test_torch_wrap_marks_inside_the_context_alone() -> None:
    inside, outside = nn.Linear(1, 1), nn.Linear(1, 1)
    with mark_by_torch_wrap():
        assert torch_wrap(inside, forward_prefetch=True) is inside
    assert torch_wrap(outside) is outside
    assert [m is inside for m in marked(nn.ModuleList([inside, outside]))] == [True]
    assert options_of(inside) == {"forward_prefetch": True}
    assert options_of(outside) == {}


def test_the_context_may_be_in_another_such() -> None:
    first, second, third, outside = (nn.Linear(2, 2) for _ in range(4))
    with mark_by_torch_wrap():  # as Fabric's init_module
        torch_wrap(first)
        with mark_by_torch_wrap():  # as the strategy's module_sharded_context
            torch_wrap(second)
        torch_wrap(third)
    torch_wrap(outside)
    assert marked(nn.ModuleList([first, second, third, outside])) == [first, second, third]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (3, "wrap() got a int"),
        (nn.ModuleList([nn.Linear(1, 1)]), "a ModuleList, which is never called"),
        (nn.ModuleDict(), "a ModuleDict, which is never called"),
    ],
)
def test_wrap_refuses_what_is_never_called(argument: object, message: str) -> None:
    with pytest.raises(ShardingError) as refused:
        fsdp_core.wrap(argument)  # type: ignore[type-var]
    assert message in str(refused.value)
    assert "Wrap its members" in str(refused.value) or "Give it a module" in str(refused.value)


def test_callback_gets_modules_that_are_marked_in_its_context() -> None:
    noted: list[nn.Module] = []
    first, second, third = (nn.Linear(1, 1) for _ in range(3))
    with mark_by_torch_wrap(), when_marked(noted.append):
        fsdp_core.wrap(first)
        torch_wrap(second)
    fsdp_core.wrap(third)
    assert [m is one for m, one in zip(noted, (first, second), strict=True)] == [True, True]
