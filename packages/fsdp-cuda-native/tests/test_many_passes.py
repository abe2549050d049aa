"""Steps of several passes gather and reduce as torch does by hand, and each part that they need is missed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import mse_loss

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring.collectives import Layer, count_in_steps
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_fits_as_plain
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.fabric_steps import assert_gradients_wait, assert_whole_steps
from fsdp_core.testing.suite.numerics.many_passes import (
    STEPS,
    WRITTEN_BEFORE_BACKWARD,
    NeededPart,
    assert_needed,
    assert_recovers_without_fabric,
    assert_right_on_one_rank,
    assert_writes_are_seen,
)
from fsdp_core.testing.training import Lit
from fsdp_cuda_native.sharded import NativeSharded
from fsdp_cuda_native.torch_private import unit_gradients
from fsdp_cuda_native.torch_private.flat_parameters import resharding
from fsdp_cuda_native.torch_private.flat_parameters.frozen import FrozenViews
from fsdp_cuda_native.torch_private.passes import nested_passes, unvisited_units
from native_runs import set_up


def sharded_by_hand(net: nn.Module) -> nn.Module:
    cpu = torch.device("cpu")
    for name, layer in net.named_children():
        if isinstance(layer, Layer):
            setattr(net, name, FullyShardedDataParallel(layer, device_id=cpu, use_orig_params=True))
    return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=True)


def test_steps_of_many_passes_communicate_as_by_hand(ranks: RankPool) -> None:
    for counts, by_hand in ranks.run(2, count_in_steps, "fsdp_native", sharded_by_hand):
        assert counts["gradient of an input"][1] == 0
        for name in ("plain", "two networks"):
            assert counts[name] == by_hand[name], name
            assert min(counts[name]) > 0, name


def shown_by_fsdp1(shown: Any) -> None:
    handle = shown._handle_ref()
    type(handle)._use_sharded_grad_views(handle)


def needed() -> dict[str, NeededPart]:
    """What steps of many passes need, by a name: what is replaced by what, and the step that is then wrong."""
    return {
        "passes of parts": NeededPart(
            nested_passes.NestedPasses,
            "prepare",
            lambda passes, unit, nodes: None,
            "fabric",
            "loss weighed by its gradient",
        ),
        "passes without gradients": NeededPart(
            nested_passes, "_gather_for_pass", lambda unit: None, "automatic", "adversarial example"
        ),
        "passes that begin at parameters": NeededPart(
            nested_passes.NestedPasses,
            "prepare_at_node",
            lambda passes, unit, node: None,
            "fabric",
            "cached loss beside another",
        ),
        "new calls in a backward pass": NeededPart(
            nested_passes.NestedPasses, "gather_again", lambda passes: None, "by hand", "cached loss"
        ),
        "passes inside a forward pass": NeededPart(
            NativeSharded,
            "_begin_backward_inside",
            lambda sharded: None,
            "automatic",
            "backward pass that is forgotten",
        ),
        "gradients of frozen parameters": NeededPart(
            unit_gradients._ShownGradients, "show", shown_by_fsdp1, "fabric", "parameters frozen after a backward pass"
        ),
        "views of frozen parameters": NeededPart(
            FrozenViews,
            "detach_frozen",
            lambda frozen_views: None,
            "fabric",
            "parameters unfrozen before the backward pass",
        ),
        "shards that the user writes": NeededPart(
            NativeSharded,
            "follow_written_shards",
            lambda sharded: None,
            "automatic",
            "optimizer's parameters written between two calls",
        ),
        "writes to what a graph keeps": NeededPart(
            resharding, "_free_written", lambda count, unit, args: None, "fabric", "blocks written while a graph waits"
        ),
        "what is saved of frozen parameters": NeededPart(
            unvisited_units,
            "finish_frozen_units",
            lambda root: None,
            "fabric",
            "parameters frozen before a backward pass that is forgotten",
        ),
        "hooks of units that are unfrozen": NeededPart(
            FrozenViews,
            "follow_requires_grad",
            lambda frozen_views: None,
            "fabric",
            "parameters frozen while an adversarial example is made",
        ),
    }


@pytest.mark.parametrize("name", needed())
def test_what_steps_of_many_passes_need(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert_needed(ranks, tmp_path, "fsdp_native", needed, name)


def test_whole_steps_in_methods_that_fabric_calls(ranks: RankPool) -> None:
    assert_whole_steps(ranks, "fsdp_native")


def test_gradients_that_wait_for_their_reduction(ranks: RankPool) -> None:
    assert_gradients_wait(ranks, "fsdp_native")


@dataclass
class Output:
    value: Any


class Held:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


#: Where a block leaves what it computes, by a name: what it returns, and how its caller gets at that.
PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a dataclass": (Output, lambda output: output.value),
    "an object": (Held, lambda output: output.value),
    "an object in a dataclass": (lambda value: Output(Held(value)), lambda output: output.value.value),
    "a closure": (lambda value: lambda: value, lambda output: output()),
}


class PlacingBlock(oracle.Block):
    place = "a dataclass"

    def forward(self, x: torch.Tensor) -> Any:
        return PLACES[self.place][0](super().forward(x))


class PlacingNet(oracle.Net):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.blocks = nn.ModuleList(PlacingBlock() for _ in range(2))
        for block in self.blocks:
            block.place = place

    def part(self, x: torch.Tensor, blocks: int) -> torch.Tensor:
        for block in self.blocks[:blocks]:
            x = PLACES[self.place][1](block(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.part(self.inp(x), len(self.blocks)))


class Penalized(Lit):
    """A penalty on the gradient of a block, and an adversarial example of the whole net."""

    def __init__(self, place: str) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.net = PlacingNet(place)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(*batch)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        (penalized,) = torch.autograd.grad(self.net.part(x, 1).sum(), x, create_graph=True)
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return mse_loss(output, y) + penalized.square().mean() + gradient.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("place", PLACES)
def test_penalties_of_blocks_that_return_objects(ranks: RankPool, tmp_path: Path, place: str) -> None:
    options = {"auto_wrap_policy": {PlacingBlock}}
    assert_fits_as_plain(ranks, tmp_path, "fsdp_native", partial(Penalized, place), options=options)


class Weighed(Penalized):
    """Calls a net whose first and last layers are tied with other weights."""

    def __init__(self) -> None:
        super().__init__("a dataclass")

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = {name: 1.1 * parameter for name, parameter in self.net.named_parameters()}
        return mse_loss(torch.func.functional_call(self.net, weights, (x,)), y) + mse_loss(self.net(0.5 * x), y)


def test_tied_parameters_are_called_with_others_in_a_step(ranks: RankPool, tmp_path: Path) -> None:
    assert_fits_as_plain(ranks, tmp_path, "fsdp_native", Weighed, steps=2, options={"auto_wrap_policy": None})


class OverFlat(Lit):
    """Steps that write to the optimizer's parameters, of which the root's are gathered then, or run the net in a hook.

    Args:
        how: What a step does.
    """

    def __init__(self, how: str) -> None:
        super().__init__("momentum")
        self.how = how
        self.automatic_optimization = how != "written after a step by hand"

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if self.how == "a hook of a block's loss":
            return self.hooked(batch[0])
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)
        return super().training_step(batch, batch_idx) if self.automatic_optimization else None

    def hooked(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net.blocks[2](x).square().mean()

        def train(scale: torch.Tensor) -> None:
            with torch.enable_grad():
                (self.net(x).square().mean() * scale).backward()

        loss.register_hook(train)
        return loss


OVER_FLAT = ("written between two calls", "written after a step by hand", "a hook of a block's loss")


@pytest.mark.parametrize("how", OVER_FLAT)
def test_flat_parameters_in_steps(ranks: RankPool, tmp_path: Path, how: str) -> None:
    options = {"auto_wrap_policy": oracle.is_layer, "use_orig_params": False}
    assert_fits_as_plain(ranks, tmp_path, "fsdp_native", partial(OverFlat, how), options=options)


@pytest.mark.parametrize("how", WRITTEN_BEFORE_BACKWARD)
def test_parameters_that_are_written_before_the_backward_pass(ranks: RankPool, tmp_path: Path, how: str) -> None:
    assert_writes_are_seen(ranks, tmp_path, "fsdp_native", how)


def test_a_backward_pass_without_fabric_after_an_exception(ranks: RankPool) -> None:
    assert_recovers_without_fabric(ranks, "fsdp_native")


def frozen_in_part() -> list[str]:
    _, net, *_ = set_up({"auto_wrap_policy": oracle.is_layer, "use_orig_params": False})
    net.blocks[1].down.requires_grad_(False)  # a unit
    assert not any(parameter.requires_grad for parameter in net.blocks[1].down.parameters())
    return [refusal(UnsupportedCapabilityError, partial(part.requires_grad_, False)) for part in (net.inp, net.out)]


def test_parts_of_flat_parameters_are_not_frozen(ranks: RankPool) -> None:
    """Their modules have no parameters, so that nothing would be frozen."""
    for messages in ranks.run(2, frozen_in_part):
        for name, message in zip(("inp", "out"), messages, strict=True):
            assert_says(message, f"requires_grad_() of '{name}' would", "a unit of its own, with auto_wrap_policy")


class Solved(torch.autograd.Function):
    """Calls a net in both passes, as fixed points do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: nn.Module) -> Any:
        ctx.save_for_backward(x)
        ctx.net = net
        return net(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.net(x)
        torch.autograd.backward(output, gradient)
        return x.grad, None


def accumulate_solved(net: nn.Module, backward: Callable[[torch.Tensor], Any], syncs: Callable[..., Any]) -> None:
    for index in range(2):
        x = torch.linspace(-1.0, 1.0 + index, 4 * oracle.FEATURES).view(4, -1).requires_grad_(True)
        with syncs(net, enabled=not index):
            solved: Any = Solved.apply(x, net)  # type: ignore[no-untyped-call]
            backward(solved.square().mean() + net(0.5 * x).square().mean())


def accumulated_solved() -> dict[str, torch.Tensor]:
    fabric, _, model, optimizer = set_up()
    accumulate_solved(model, fabric.backward, fabric.no_backward_sync)
    optimizer.step()
    return full_state(fabric.strategy)


def test_what_waits_is_reduced_once_where_a_function_calls_the_net(ranks: RankPool) -> None:
    """A unit is reduced in a backward pass inside of which it is called again."""
    net = oracle.new_net()
    optimizer = oracle.sgd(net)
    accumulate_solved(net, torch.autograd.backward, lambda *_, **__: nullcontext())
    optimizer.step()
    for state in ranks.run(2, accumulated_solved):
        torch.testing.assert_close(state, dict(net.state_dict()), atol=FP32_TOLERANCE, rtol=0)


def transposed_in_a_call() -> str:
    _, net, model, _ = set_up()

    def transpose(layer: nn.Linear, _: Any) -> None:
        with torch.no_grad():
            layer.weight.t_()

    net.blocks[1].down.register_forward_pre_hook(transpose)
    return refusal(ShardingError, lambda: model(oracle.global_batches(1)[0][0]))


def test_a_weight_that_a_call_transposes_in_place_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, transposed_in_a_call):
        assert_says(message, "t_() of 'blocks.1.down.weight' while it is gathered", "parameter.t()")


@pytest.mark.parametrize("what", sorted(name for name in STEPS if "frozen" in name))
def test_parameters_that_a_step_on_one_rank_freezes(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """FSDP1 shards nothing there, and its modules keep the memory of their shards."""
    assert_right_on_one_rank(ranks, tmp_path, "fsdp_native", what)
