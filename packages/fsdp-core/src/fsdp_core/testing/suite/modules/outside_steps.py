"""The model outside of steps: in hooks, after training, and gathered on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core import full_state_dict, gathered
from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import BATCH, FEATURES, FP32_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, fit_module, loader, new_trainer

__all__ = ["OutsideStepsSuite"]

#: Calls outside of a step, given an input: of the LightningModule, of its model, and of the model's parts.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "all": lambda module, x: module(x),
    "its model": lambda module, x: module.net(x),
    "a layer of the root": lambda module, x: module.net.inp(x),
    "a unit": lambda module, x: module.net.blocks[0](x),
    "layers in turn": lambda module, x: module.net.out(module.net.blocks[1](module.net.inp(x))),
}


class CallsItself(Lit):
    """Calls itself in hooks, and records the outputs."""

    def __init__(self, inference: bool) -> None:
        super().__init__("momentum")
        self.inference = inference
        self.seen: list[dict[str, float]] = []

    def look(self, *_: Any) -> None:
        x = torch.ones(BATCH, FEATURES, device=self.device)
        seen = {}
        for name, call in CALLS.items():
            call(self, x)  # with a graph that is never used
            with torch.no_grad():
                seen[name] = float(call(self, x).sum())
        if self.inference:
            with torch.inference_mode():
                seen["in inference mode"] = float(self.net(x).sum())
        self.seen.append(seen)

    on_fit_start = on_train_start = on_train_epoch_end = on_validation_epoch_end = on_train_end = look

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()


def _outputs_in_hooks(strategy: str, tmp: str, world_size: int, inference: bool) -> list[dict[str, float]]:
    module = CallsItself(inference)
    run = new_trainer(tmp, strategy, world_size, max_epochs=2)
    run.fit(module, loader(2, world_size), loader(1, world_size))
    module.look()
    return module.seen


def _calls_of_one_rank(strategy: str, tmp: str) -> tuple[str, str]:
    """The errors of a call and of an export that only rank 0 makes."""

    class CalledOnRank0(Lit):
        messages = ("", "")

        def on_train_batch_end(self, *_: Any) -> None:
            x = torch.ones(BATCH, FEATURES)
            if self.global_rank == 0:
                self.messages = (
                    refusal(ShardingError, lambda: self.net(x)),
                    refusal(ShardingError, lambda: full_state_dict(self)),
                )

    module = CalledOnRank0()
    run: Any = new_trainer(tmp, strategy, 2)
    run.strategy.runtime.patience = timedelta(seconds=1)
    run.fit(module, loader(1, 2))
    return module.messages


class UsesAShard(Lit):
    """Uses a parameter without calling its module."""

    def on_train_epoch_end(self) -> None:
        torch.ones(2, FEATURES, device=self.device) @ self.net.inp.weight.T


def _step_after_calls(strategy: str | None, name: str) -> Trained:
    """Steps with calls between a backward pass and the optimizer's step, some of which fail."""
    loop = Loop(strategy)
    call = partial(CALLS[name], SimpleNamespace(net=loop.net))
    ones = torch.ones(BATCH, FEATURES, device=next(loop.net.parameters()).device)
    for x, y in loop.batches(2):
        parameter_ids = list(map(id, loop.net.parameters()))
        loop.backward(loop.loss(x, y))
        call(ones)  # with a graph that is never used
        with torch.no_grad():
            call(ones)
        with suppress(RuntimeError):
            call(ones[:, 1:])  # a wrong shape, which every module refuses
        loop.optimizer.step()
        call(ones)
        assert list(map(id, loop.net.parameters())) == parameter_ids, "a call has replaced the module's parameters"
        loop.optimizer.zero_grad()
    return [], loop.state()


def _use_a_shard(strategy: str, tmp: str) -> list[str]:
    """Torch's error with its notes; nothing if none was raised."""
    run = new_trainer(tmp, strategy, 2)
    try:
        run.fit(UsesAShard(), loader(1, 2))
    except RuntimeError as error:
        return ["\n".join([str(error), *getattr(error, "__notes__", ())])]
    return []


def _interrupt(strategy: str) -> tuple[str, dict[str, Tensor] | None, dict[str, Tensor]]:
    """What happens after a backward pass that raised.

    Returns:
        The error of the next forward pass; the model's state after two steps, if it can go on; and the state of another
        model after two steps that it takes in between.
    """
    loop = Loop(strategy)
    first, (x, y) = loop.batches(2)
    loop.step_on(*first)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    hook = loop.net.blocks[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with suppress(ZeroDivisionError):
        loop.backward(loop.loss(x, y))
    hook.remove()
    message = refusal(ShardingError, lambda: loop.model(x))
    other_net = oracle.new_net()
    other_model, other_optimizer = loop.fabric.setup(other_net, oracle.momentum(other_net))
    for batch in (first, (x, y)):
        loop.fabric.backward(mse_loss(other_model(batch[0]), batch[1]))
        other_optimizer.step()
        other_optimizer.zero_grad()
    other_state = full_state_dict(other_net)
    if was_refused(message):  # it still is
        message = refusal(ShardingError, lambda: loop.model(x))
    loop.optimizer.zero_grad()
    message_of_step = refusal(ShardingError, lambda: loop.step_on(x, y))
    if was_refused(message_of_step):
        return message_of_step, None, other_state
    return message, full_state_dict(loop.net), other_state


@torch.no_grad()
def _write(net: Any) -> None:
    net.inp.weight.mul_(1.5)
    net.blocks[0].gain.fill_(2.0)
    net.blocks[1].down.bias.zero_()


def _gather(strategy: str) -> dict[str, Any]:
    """What a rank sees of whole parameters, and the state after a write to them and a step."""
    loop = Loop(strategy)
    fabric = loop.fabric
    net = loop.net
    model = loop.model
    first, second = loop.batches(2)
    loop.step_on(*first)
    x = torch.ones(BATCH, FEATURES, device=fabric.device)
    seen: dict[str, Any] = {}
    last = fabric.world_size - 1
    with gathered(model):
        shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        assert net.out.weight is net.inp.weight, "tied parameters are not the same object"
        if fabric.global_rank == last:  # alone
            with torch.no_grad():
                seen["called"] = [float(net(x).sum()), float(model(x).sum()), float(net.blocks[0](x).sum())]
            seen["read"] = float(net.inp.weight.detach().norm())
    with gathered(net.blocks[0]):
        if fabric.global_rank == last:
            seen["part"] = float(net.blocks[0](x).detach().sum())
    with gathered(model, modifier_rank=last):
        if fabric.global_rank == last:
            _write(net)
            net.load_state_dict({name: value.detach().clone() for name, value in net.state_dict().items()})
            assert torch.equal(copy.deepcopy(net).inp.weight, net.inp.weight)
    loop.step_on(*second)
    return {"seen": seen, "shapes": shapes, "state": loop.state()}


def _misuse(strategy: str) -> tuple[dict[str, str], bool]:
    """The errors of invalid uses of ``gathered()``, and whether the state is unchanged."""
    loop = Loop(strategy)
    fabric, net = loop.fabric, loop.net
    state = loop.state()

    def refusal_of(use: Callable[[], Any], **settings: Any) -> str:
        def enter() -> None:
            with gathered(loop.model, **settings):
                use()

        return refusal(ShardingError, enter)

    def replace() -> None:
        net.inp.weight = nn.Parameter(torch.ones(FEATURES, FEATURES))

    def fail() -> None:
        if fabric.global_rank == 0:
            raise ValueError("of rank 0")

    x = torch.ones(BATCH, FEATURES, device=fabric.device)
    messages = {
        "written": refusal_of(lambda: _write(net)),
        "trained": refusal_of(lambda: net(x).sum().backward()),
        "replaced": refusal_of(replace),
        "frozen": refusal_of(lambda: net.inp.weight.requires_grad_(False)),
        "nested": refusal_of(lambda: gathered(loop.model).__enter__()),
    }
    if fabric.world_size > 1:
        messages["raised"] = refusal_of(fail).removeprefix("instead of a refusal: ")
        messages["written otherwise"] = refusal_of(lambda: fabric.global_rank and _write(net), modifier_rank=0)
    new_state = loop.state()
    return messages, all(torch.equal(new_state[name], tensor) for name, tensor in state.items())


def _within_inference_mode(strategy: str, tmp: str) -> tuple[float, list[float], Trained, Trained]:
    """The loss of a test in inference mode, the losses of training after it, and two outcomes under Fabric.

    The first outcome is that of a net that was set up, saved, loaded and gathered in inference mode. The second is that
    of a net that was set up as usual, and first called in inference mode.
    """
    path = str(Path(tmp) / "checkpoint")
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit("momentum"), loader(1, 2))
    run.save_checkpoint(path)
    module = Lit("momentum")
    run = new_trainer(tmp, strategy, 2)
    with torch.inference_mode():
        run.test(module, loader(1, 2), ckpt_path=path, verbose=False)
    test_loss = float(run.callback_metrics["test_loss"])
    losses, _ = fit_module(strategy, tmp, module, 2)
    net = oracle.new_net()
    with torch.inference_mode():
        loop = Loop(strategy, net=net)
        x = torch.ones(BATCH, FEATURES, device=loop.fabric.device)
        loop.model(x)
        objects = {"model": loop.model, "optimizer": loop.optimizer}
        loop.fabric.save(f"{path} of fabric", objects)
        loop.fabric.load(f"{path} of fabric", objects)
        with gathered(loop.model):
            net(x)
    _, state = loop.train(loop.batches(2))
    later = Loop(strategy)
    x = torch.ones(BATCH, FEATURES, device=later.fabric.device)
    with torch.inference_mode():
        later.net.blocks[0](x)
        later.net(x)
    _, later_state = later.train(later.batches(2))
    return test_loss, losses, ([], state), ([], later_state)


class OutsideStepsSuite(Clauses):
    """Uses of a model outside of steps work as in one process, or are refused."""

    @pytest.mark.parametrize(
        "inference",
        [False, pytest.param(True, marks=on_ranks("processes"))],
        ids=["without gradients", "inference mode"],
    )
    def test_calls_outside_of_steps(self, ranks: Ranks, tmp_path: Path, inference: bool) -> None:
        """In hooks and after training, the model and its parts must be callable, without an effect on training."""
        want = _outputs_in_hooks("auto", str(tmp_path / "plain"), 1, inference)
        for seen in ranks.run(2, _outputs_in_hooks, self.strategy, str(tmp_path), 2, inference):
            assert len(seen) == len(want), f"the model was called in {len(seen)} hooks instead of {len(want)}"
            for got, expected in zip(seen, want, strict=True):
                assert got == pytest.approx(expected, abs=FP32_TOLERANCE * BATCH * FEATURES)

    @pytest.mark.parametrize("name", [name for name in CALLS if name != "all"])
    def test_calls_leave_shards_and_gradients_alone(self, ranks: Ranks, name: str) -> None:
        """Calls between a backward pass and its step, even failing ones, must keep gradients and sharded parameters."""
        assert_same(ranks.run(2, _step_after_calls, self.strategy, name), _step_after_calls(None, name))

    def test_an_interrupted_backward_pass(self, ranks: Ranks) -> None:
        """After a backward pass that raised, training must be correct, or an error must say how to continue.

        Another model must train as if nothing had been.
        """
        _, want = oracle.train_plain(2, oracle.momentum)
        for rank, (message, state, other_state) in enumerate(ranks.run(2, _interrupt, self.strategy)):
            if rank == 0:
                assert_same([([], other_state)], ([], want))
            if state is None:
                assert_says(message, "can't recover", "load a checkpoint")
                continue
            if was_refused(message):
                assert_says(message, "an exception has interrupted a backward pass", "optimizer.zero_grad()")
            if rank == 0:
                assert_same([([], state)], ([], want))

    @on_ranks("processes")
    def test_a_call_by_one_rank_alone(self, ranks: Ranks, tmp_path: Path) -> None:
        """A collective that only one rank calls must raise an error soon: it must neither hang nor mix up data."""
        (called, exported), _ = ranks.run(2, _calls_of_one_rank, self.strategy, str(tmp_path))
        assert_says(exported, "rank 0 waited 1 s in a gathering of full weights", "what rank 1 did not do")
        if was_refused(called):  # otherwise the call needs no collective
            assert_says(
                called, "rank 0 waited 1 s in a call of Net ('net') outside of a step", "what rank 1 did not do"
            )
            assert_says(called, "fsdp_core.gathered(module)", "synced_gpus=True")

    def test_a_shard_that_is_used_as_a_parameter(self, ranks: Ranks, tmp_path: Path) -> None:
        """If a part of the model can't be called since parameters are shards, what to write must be told."""
        for messages in ranks.run(2, _use_a_shard, self.strategy, str(tmp_path)):
            for note in messages:
                assert_says(note, "parameters are shards", "with fsdp_core.gathered(module):")

    def test_gathered(self, ranks: Ranks) -> None:
        """In ``gathered()``, one rank must read, call and write whole parameters; all ranks train with its values."""
        loop = Loop(None)
        net = loop.net
        x = torch.ones(BATCH, FEATURES)
        first, second = loop.batches(2)
        loop.step_on(*first)
        with torch.no_grad():
            called = [float(net(x).sum()), float(net(x).sum()), float(net.blocks[0](x).sum())]
        read = float(net.inp.weight.detach().norm())
        _write(net)
        loop.step_on(*second)
        results = each_ranks(ranks, ranks.run(2, _gather, self.strategy))
        for got in results:
            assert got["shapes"] == {name: tuple(value.shape) for name, value in net.state_dict().items()}
            for name, value in net.state_dict().items():
                torch.testing.assert_close(got["state"][name].cpu(), value, rtol=0, atol=FP32_TOLERANCE)
        seen = results[-1]["seen"]
        tolerance = FP32_TOLERANCE * BATCH * FEATURES
        assert seen["called"] == pytest.approx(called, abs=tolerance)
        assert seen["part"] == pytest.approx(called[-1], abs=tolerance)
        assert seen["read"] == pytest.approx(read, abs=tolerance)

    def test_gathered_refuses_what_it_can_not_take_over(self, ranks: Ranks) -> None:
        """``gathered()`` must refuse changes that it can't apply, and leave the state as it was."""
        for messages, is_same in each_ranks(ranks, ranks.run(2, _misuse, self.strategy)):
            assert_says(messages["written"], "'inp.weight', which no rank was to change", "modifier_rank=0")
            assert_says(messages["trained"], "has got a gradient", "torch.autograd.grad()")
            assert_says(messages["replaced"], "'inp.weight' was replaced")
            assert_says(messages["frozen"], "'inp.weight' was frozen")
            assert_says(messages["nested"], "inside another gathered()")
            if "written otherwise" in messages:
                assert_says(messages["raised"], "ValueError", "of rank 0")
                assert_says(messages["written otherwise"], "rank 1 changed 'inp.weight'", "modifier_rank=1")
            assert is_same, "a refused change has modified the state"

    @on_ranks("processes")
    def test_inference_mode(self, ranks: Ranks, tmp_path: Path) -> None:
        """What is sharded, gathered, loaded or first called in inference mode must be trainable afterwards."""
        net = oracle.new_net()
        oracle.train_plain(1, oracle.momentum, net=net)
        x, y = oracle.global_batches(1)[0]
        test_loss = float(mse_loss(net(x), y).detach())
        losses, _ = oracle.train_plain(2, oracle.momentum, net=net)
        _, state = oracle.train_plain(2, oracle.momentum)
        for rank_test_loss, rank_losses, *got in ranks.run(2, _within_inference_mode, self.strategy, str(tmp_path)):
            assert rank_test_loss == pytest.approx(test_loss, abs=FP32_TOLERANCE)
            assert rank_losses == pytest.approx(losses, abs=FP32_TOLERANCE)
            assert_same(got, ([], state))
