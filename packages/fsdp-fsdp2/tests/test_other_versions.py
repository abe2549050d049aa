"""What other versions of torch lack, or do otherwise, called directly; `nox -s versions` runs a few clauses on them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state, sharded_by
from fsdp_core.testing.training import new_fabric
from fsdp_fsdp2.torch_private import forward_passes, parameter_groups, unused_parameters


def interrupted() -> tuple[str, str, bool]:
    fabric = new_fabric("fsdp2", 2)
    net = oracle.new_net()
    model = fabric.setup(net)
    strategy: Any = fabric.strategy
    sharded: Any = sharded_by(strategy)
    sharded.reset()  # torch has nothing to recover yet, and would raise
    model(oracle.global_batches(1)[0][0])
    before = full_state(strategy)
    sharded.reset()
    recovered = refusal(ShardingError, sharded.check_recoverable)
    with mock.patch.object(FSDPModule, "reset_iter_state", None, create=True):
        sharded.reset()
    after = full_state(strategy)
    same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return recovered, refusal(ShardingError, lambda: strategy.backend.shard(net)), same


def test_a_torch_that_cannot_recover_from_an_exception(ranks: RankPool) -> None:
    """Before 2.13; only then is a module refused whose step an exception has interrupted. Its weights can be saved."""
    for recovered, refused, same in ranks.run(2, interrupted):
        if hasattr(FSDPModule, "reset_iter_state"):
            assert recovered == "instead of a refusal: nothing was raised"
        assert_says(refused, "has interrupted a step of Net, ", "load a checkpoint, or upgrade to torch 2.13")
        assert same


def computed_with_norms() -> tuple[dict[str, float], str]:
    mesh = init_device_mesh("cpu", (2,))
    first, second = (distribute_tensor(torch.arange(n), mesh, [Shard(0)]) for n in (6.0, 4.0))
    computed = {
        "sum of norms": first.norm() + second.norm(),
        "norm and a number": first.norm() + 1.0,
        "negative norm": first.norm() * -0.5,
        "sum and a number": first.sum() + 1.0,
        "sum of sums": first.sum() + second.sum(),
    }
    told = refusal(RuntimeError, lambda: first.norm().add_(second.norm()))
    return {name: float(value.full_tensor()) for name, value in computed.items()}, told


def test_norms_of_shards_are_added_up(ranks: RankPool) -> None:
    """Before torch 2.11 or so, a DTensor adds them rank by rank."""
    first, second = torch.arange(6.0), torch.arange(4.0)
    want = {
        "sum of norms": float(first.norm() + second.norm()),
        "norm and a number": float(first.norm() + 1.0),
        "negative norm": float(first.norm() * -0.5),
        "sum and a number": 16.0,
        "sum of sums": 21.0,
    }
    for got, told in ranks.run(2, computed_with_norms):
        assert got == pytest.approx(want)
        assert_says(told, "add_")


class State:
    """A root's state, whose callback notes the mode that it is called in and clears it, as torch 2.15 does."""

    def __init__(self, **context: Any) -> None:
        self._state_ctx = SimpleNamespace(**context)
        self.modes: list[Any] = []

    def _root_post_backward_final_callback(self) -> None:
        self.modes.append(getattr(self._state_ctx, "manual_backward_finalization_active", "unknown"))
        if hasattr(self._state_ctx, "manual_backward_finalization_active"):
            self._state_ctx.manual_backward_finalization_active = None


def test_the_end_of_a_backward_pass_has_the_mode_that_later_versions_expect() -> None:
    later = State(manual_backward_finalization=True, manual_backward_finalization_active=None)
    forward_passes.end_backward(later)
    later._state_ctx.manual_backward_finalization_active = False  # as torch's registration sets it
    forward_passes.end_backward(later)
    today = State()
    forward_passes.end_backward(today)
    assert (later.modes, today.modes) == ([True, False], ["unknown"])


class Later:
    """A parameter whose accumulated gradient is that of the unsharded one, as from torch 2.15 on."""

    def __init__(self, grad_dtype: torch.dtype | None) -> None:
        self._unsharded_param = SimpleNamespace(grad=None, dtype=torch.bfloat16, grad_dtype=grad_dtype)

    @property
    def unsharded_accumulated_grad(self) -> Any:
        return self._unsharded_param.grad


def test_an_accumulated_gradient_is_set_where_the_version_keeps_it() -> None:
    grad = torch.tensor([1.5], dtype=torch.float64)
    for grad_dtype, want in ((torch.float32, torch.float32), (None, torch.bfloat16)):
        later = Later(grad_dtype)
        parameter_groups.set_accumulated_gradient(later, grad)
        assert torch.equal(later.unsharded_accumulated_grad, grad.to(want))
        parameter_groups.set_accumulated_gradient(later, None)
        assert later.unsharded_accumulated_grad is None
    today = SimpleNamespace(unsharded_accumulated_grad=None)
    parameter_groups.set_accumulated_gradient(today, grad)
    assert today.unsharded_accumulated_grad is grad


class Group:
    """What a unit calls around its forward and backward passes."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def pre_forward(self, *args: Any) -> str:
        self.called.append(("forward", *args))
        return "as it was"

    def post_backward(self, *args: Any) -> None:
        self.called.append(("backward", *args))


def test_a_unit_goes_on_without_the_object_that_counted_its_calls() -> None:
    """Its hooks hold it weakly, and a unit may outlive it."""
    group, state, gone = Group(), State(), weakref.ref(Group())
    unused: Any = gone
    assert unused() is None
    assert unused_parameters._pre_forward(unused, weakref.ref(group), 1, 2) == "as it was"
    unused_parameters._post_backward(unused, weakref.ref(group), 3)
    unused_parameters._final_callback(unused, weakref.ref(state))
    unused_parameters._post_backward(unused, unused, 4)  # of a unit that is gone too
    unused_parameters._final_callback(unused, unused)
    assert group.called == [("forward", 1, 2), ("backward", 3)]
    assert state.modes == ["unknown"]
