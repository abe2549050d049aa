"""Steps of several passes gather and reduce as torch does by hand, and each part that they need is missed."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import mse_loss

from fsdp2_runs import set_up
from fsdp_core import UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.measuring.collectives import Layer, count_in_steps
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import refusal
from fsdp_core.testing.short_runs import assert_close_by_name, assert_fits_as_plain, fit_module
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.fabric_steps import assert_gradients_wait, assert_whole_steps
from fsdp_core.testing.suite.numerics.many_passes import (
    WRITTEN_BEFORE_BACKWARD,
    NeededPart,
    assert_needed,
    assert_recovers_without_fabric,
    assert_writes_are_seen,
)
from fsdp_core.testing.training import Lit, new_fabric, own_share
from fsdp_core.watch import watcher
from fsdp_fsdp2.sharded import FSDP2Sharded
from fsdp_fsdp2.torch_private import forward_passes, frozen_shards, unit_calls, unused_parameters


def sharded_by_hand(net: nn.Module) -> nn.Module:
    for layer in net.children():
        if isinstance(layer, Layer):
            fully_shard(layer)
    fully_shard(net)
    return net


def test_steps_of_many_passes_communicate_as_by_hand(ranks: RankPool) -> None:
    for counts, by_hand in ranks.run(2, count_in_steps, "fsdp2", sharded_by_hand):
        assert counts["gradient of an input"][1] == 0
        for name in ("plain", "two networks"):
            (gathers, reductions), (gathers_by_hand, reductions_by_hand) = counts[name], by_hand[name]
            assert reductions == reductions_by_hand > 0, name
            assert 0 < gathers <= gathers_by_hand, name  # the last unit stays gathered for its backward pass


def ends_for_torch_alone(unused: Any, of: Any) -> None:
    forward_passes.end_backward(of())


def needed() -> dict[str, NeededPart]:
    """What steps of many passes need, by a name: what is replaced by what, and the step that is then wrong."""
    return {
        "forward passes go on": NeededPart(
            unused_parameters, "running_states", lambda state: [], "automatic", "adversarial example"
        ),
        "frozen and unfrozen shards": NeededPart(
            frozen_shards, "carry_requires_grad", lambda group: None, "automatic", "parameters frozen for a call"
        ),
        "ends of all units": NeededPart(
            unused_parameters, "_final_callback", ends_for_torch_alone, "fabric", "product of two calls"
        ),
        "new calls in a backward pass": NeededPart(
            FSDP2Sharded, "is_idle", lambda sharded: False, "automatic", "cached loss"
        ),
        "passes without gradients": NeededPart(
            unused_parameters.UnusedParameters, "accumulates", lambda unused: True, "fabric", "adversarial example"
        ),
        "shards that the user writes": NeededPart(
            FSDP2Sharded,
            "follow_written_shards",
            lambda sharded: None,
            "automatic",
            "optimizer's parameters written between two calls",
        ),
        "writes to what a graph keeps": NeededPart(
            unit_calls, "free_written", lambda groups, graphs: False, "automatic", "blocks written while a graph waits"
        ),
    }


@pytest.mark.parametrize("name", needed())
def test_what_steps_of_many_passes_need(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert_needed(ranks, tmp_path, "fsdp2", needed, name)


def test_whole_steps_in_methods_that_fabric_calls(ranks: RankPool) -> None:
    assert_whole_steps(ranks, "fsdp2")


def test_gradients_that_wait_for_their_reduction(ranks: RankPool) -> None:
    assert_gradients_wait(ranks, "fsdp2")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = oracle.new_net()

    def named(self, x: torch.Tensor, y: torch.Tensor, backward: Any, names: tuple[str, ...]) -> None:
        inputs = [p for name, p in self.net.named_parameters() if p.requires_grad and name.startswith(names)]
        backward(mse_loss(self.net(x), y), inputs=inputs)


def trained_by_name(options: Any, names: tuple[str, ...]) -> str | dict[str, torch.Tensor]:
    fabric = new_fabric("fsdp2", 2, options)
    module = Named()
    model, optimizer = fabric.setup(module, oracle.sgd(module))
    model.mark_forward_method("named")
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    try:
        model.named(x, y, fabric.backward, names)
    except UnsupportedCapabilityError as refused:
        return str(refused)
    optimizer.step()
    return full_state(fabric.strategy)


@pytest.mark.parametrize("options", [None, {"auto_wrap_policy": None}])
@pytest.mark.parametrize("names", [("inp", "out"), ("blocks.1", "out")])
def test_backward_passes_for_named_parameters(ranks: RankPool, options: Any, names: tuple[str, ...]) -> None:
    module = Named()
    x, y = oracle.global_batches(1)[0]
    module.named(x, y, torch.Tensor.backward, names)
    oracle.sgd(module).step()
    for got in ranks.run(2, trained_by_name, options, names):
        if options is None and "blocks.1" in names:
            assert isinstance(got, str)
            assert "backward(inputs=...) with respect to 'net.blocks.1.up.weight', which is sharded" in got
            assert "requires_grad_(False)" in got
        else:
            torch.testing.assert_close(got, dict(module.state_dict()), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", WRITTEN_BEFORE_BACKWARD)
def test_parameters_that_are_written_before_the_backward_pass(ranks: RankPool, tmp_path: Path, how: str) -> None:
    assert_writes_are_seen(ranks, tmp_path, "fsdp2", how)


def step_with_hooks_of_activations(net: oracle.Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss in whose backward pass the whole net is run forward and backward in the middle of each block."""

    def train(_: torch.Tensor) -> None:
        with torch.enable_grad():
            net(x.flip(1)).square().mean().backward()

    def watch(*call: Any) -> None:
        call[-1].register_hook(train)

    hooks = [block.register_forward_hook(watch) for block in net.blocks]
    loss = mse_loss(net(x), y)
    for hook in hooks:
        hook.remove()
    return loss


class HookingActivations(Lit):
    def __init__(self) -> None:
        super().__init__("momentum")

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return step_with_hooks_of_activations(self.net, *batch)


def trained_with_hooks_of_activations() -> dict[str, torch.Tensor]:
    fabric, _, model, optimizer = set_up(optimizer=oracle.momentum)
    for batch in oracle.global_batches(3):
        optimizer.zero_grad()
        fabric.backward(step_with_hooks_of_activations(model.module, *own_share(fabric, batch)))
        optimizer.step()
    return full_state(fabric.strategy)


def test_hooks_of_activations_that_run_the_whole_net(ranks: RankPool, tmp_path: Path) -> None:
    assert_fits_as_plain(ranks, tmp_path, "fsdp2", HookingActivations)
    _, want = fit_module(HookingActivations, "auto", str(tmp_path), 1, 3)
    for got in ranks.run(2, trained_with_hooks_of_activations):
        assert_close_by_name({f"net.{name}": tensor for name, tensor in got.items()}, want)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch can't recover before 2.13: it is refused"
)
def test_a_backward_pass_without_fabric_after_an_exception(ranks: RankPool) -> None:
    assert_recovers_without_fabric(ranks, "fsdp2")


def frozen_in_one_of_two_calls(
    net: oracle.Net, call: Any, x: torch.Tensor, y: torch.Tensor, *, first: bool
) -> torch.Tensor:
    frozen = [*net.blocks[0].parameters(), net.inp.weight]
    for parameter in frozen:
        parameter.requires_grad_(not first)
    loss = mse_loss(call(x), y)
    for parameter in frozen:
        parameter.requires_grad_(first)
    loss = loss + mse_loss(call(x.flip(1)), y)
    for parameter in frozen:
        parameter.requires_grad_(True)
    return loss


def trained_when_frozen_in_one_call(options: dict[str, Any], first: bool) -> dict[str, torch.Tensor]:
    fabric, net, model, optimizer = set_up(options)
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    fabric.backward(frozen_in_one_of_two_calls(net, model, x, y, first=first))
    optimizer.step()
    return full_state(fabric.strategy)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"auto_wrap_policy": None}])
def test_parameters_unfrozen_at_their_shards_while_a_unit_stays_gathered(
    ranks: RankPool, options: Any, first: bool
) -> None:
    net = oracle.new_net()
    optimizer = oracle.sgd(net)
    frozen_in_one_of_two_calls(net, net, *oracle.global_batches(1)[0], first=first).backward()
    optimizer.step()
    for got in ranks.run(2, trained_when_frozen_in_one_call, options, first):
        torch.testing.assert_close(got, dict(net.state_dict()), atol=FP32_TOLERANCE, rtol=0)


def penalised_outside() -> str:
    fabric, net, model, _ = set_up()
    x, y = own_share(fabric, oracle.global_batches(1)[0])
    try:
        mse_loss(model(x) * net.blocks[0].norm.weight, y)
    except RuntimeError as error:
        printed = io.StringIO()
        with mock.patch.object(watcher, "_watching", None), redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
        return printed.getvalue()
    return "no error"


def test_an_error_between_calls_that_nothing_catches_says_what_to_write(ranks: RankPool) -> None:
    for printed in ranks.run(2, penalised_outside):
        assert "mixed torch.Tensor and DTensor" in printed
        assert printed.count("weight_decay") == 1


def train_after_an_abandoned_model() -> list[float]:
    """One rank holds a model of which no optimizer has stepped, and the other has let it go."""
    fabric, abandoned, model, _ = set_up({"auto_wrap_policy": None})
    model(torch.ones(2, oracle.FEATURES))
    kept = (abandoned, model) if fabric.global_rank else None
    del abandoned, model, _
    gc.collect()
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for x, y in oracle.global_batches(2):
        loss = mse_loss(model(x), y)
        losses.append(float(loss))
        fabric.backward(loss)
        optimizer.step()
    assert kept is None or fabric.global_rank
    return losses


def test_a_model_that_one_rank_has_let_go_stops_no_other(ranks: RankPool) -> None:
    first, second = ranks.run(2, train_after_an_abandoned_model)
    assert first == pytest.approx(second)


def converted() -> list[str]:
    fabric = new_fabric("fsdp2", 2)
    net = oracle.new_net()
    fabric.setup(net, oracle.sgd(net))
    conversions = (net.half, net.blocks[0].double, lambda: net.to("meta"))
    return [refusal(UnsupportedCapabilityError, convert) for convert in conversions]


def test_conversions_of_a_sharded_module_are_refused(ranks: RankPool) -> None:
    for refused in ranks.run(2, converted):
        assert all("a sharded module can't be converted to another device or dtype" in message for message in refused)
