"""Units marked by hand."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import wrap as torch_wrap

import fsdp_core
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.wrap import mark_by_torch_wrap, marked, options_of, when_marked
from fsdp_core.sharding.wrap_policy import select_units


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
    ("what", "told"),
    [
        (3, "wrap() got a int"),
        (nn.ModuleList([nn.Linear(1, 1)]), "a ModuleList, which is never called"),
        (nn.ModuleDict(), "a ModuleDict, which is never called"),
    ],
)
def test_what_can_be_no_unit_is_refused(what: object, told: str) -> None:
    with pytest.raises(ShardingError) as refused:
        fsdp_core.wrap(what)  # type: ignore[type-var]
    assert told in str(refused.value)
    assert "Wrap its members" in str(refused.value) or "Give it a module" in str(refused.value)


def test_what_is_marked_in_a_context_is_told() -> None:
    told: list[nn.Module] = []
    first, second, third = (nn.Linear(1, 1) for _ in range(3))
    with mark_by_torch_wrap(), when_marked(told.append):
        fsdp_core.wrap(first)
        torch_wrap(second)
    fsdp_core.wrap(third)
    assert [m is one for m, one in zip(told, (first, second), strict=True)] == [True, True]
