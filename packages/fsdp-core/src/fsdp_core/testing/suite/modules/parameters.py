"""Special parameters and state: 0-dim and frozen parameters, batch norm, state that is not a tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchmetrics import SumMetric

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, result_or_refusal, was_refused
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks, precisions, requires
from fsdp_core.testing.suite.numerics.parity import assert_same_or_refused, assert_state_close
from fsdp_core.testing.training import Lit, fit_module, fit_plainly, means, new_fabric, own_share

__all__ = ["Gains", "ParametersSuite", "gains_in", "sgd_of_gains"]


UNFROZEN, UNUSED = "unfrozen later", "unused in the last micro-batch"


class Gains(nn.Module):
    """Two 0-dim parameters. A forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.layer = nn.Linear(FEATURES, FEATURES)
        self.first_gain = nn.Parameter(torch.tensor(0.5))
        self.second_gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, use_second: bool = True) -> Tensor:
        x = self.layer(x) * self.first_gain
        return x * self.second_gain if use_second else x


def sgd_of_gains(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a rate at which the 0-dim parameters move."""
    return torch.optim.SGD(net.parameters(), lr=0.1)


def gains_in(state: Mapping[str, Tensor]) -> dict[str, float]:
    """The values of the two 0-dim parameters in a full state."""
    return {name: state[name].item() for name in ("first_gain", "second_gain")}


def _train_gains(strategy: str | None, scenario: str) -> dict[str, float]:
    net = Gains()
    if scenario == UNFROZEN:
        net.first_gain.requires_grad_(False)
        net.second_gain.requires_grad_(False)
    loop = Loop(strategy, sgd_of_gains, net)
    if scenario == UNUSED:
        _accumulate_three_batches(loop)
    else:
        for index, (x, y) in enumerate(loop.batches(3)):
            if index == 1:
                net.first_gain.requires_grad_(True)
                net.second_gain.requires_grad_(True)
            loop.step_on(x, y)
    return gains_in(loop.state())


def _accumulate_three_batches(loop: Loop) -> None:
    """Take one step on three micro-batches, the last of which does not use the second gain."""
    for index, (x, y) in enumerate(loop.batches(3)):
        is_last = index == 2
        with loop.unreduced(not is_last):
            output = loop.model(x, use_second=not is_last)
            loop.backward(mse_loss(output, y))
    loop.step()


def _unfreeze_later(strategy: str | None, precision: Any = None, evaluate_first: bool = False) -> list[float]:
    """The losses of three steps, before the second of which a block is unfrozen."""
    net: Any = oracle.new_net()
    net.blocks[1].requires_grad_(False)
    loop = Loop(strategy, oracle.sgd, net, precision=precision)
    losses = []
    for index, (x, y) in enumerate(loop.whole_batches(3)):
        if index == 1:
            if evaluate_first:
                with torch.no_grad():
                    loop.model(x)
            net.blocks[1].requires_grad_(True)
        losses.append(loop.step_on(x, y).item())
    return losses


class Normed(nn.Module):
    """A model with a batch norm, which must not compute in half precision."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.inp = nn.Linear(FEATURES, 8)
            self.norm = nn.BatchNorm1d(8)
            self.out = nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.relu(self.norm(self.inp(x))))


def _train_with_batch_norm(strategy: str, precision: Any) -> Trained:
    loop = Loop(strategy, oracle.momentum, Normed(), precision=precision)
    losses = []
    for x, y in loop.whole_batches(3):  # the same batch on both ranks, so that statistics equal the oracle's
        loss = loop.loss(x, y)
        losses.append(loss.item())
        loop.backward(loss)
        loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=10.0)
        loop.step()
    return losses, loop.state()


class Stateful(nn.Module):
    """A module with state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.count = 0
        self.total = SumMetric()
        self.total.persistent(True)

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.layer(x)

    def get_extra_state(self) -> Tensor:
        """The number of forward passes."""
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore it."""
        self.count = int(state)


def _restore_extra_state(strategy: str, path: str) -> tuple[int, float]:
    """The count and the metric's sum of a module that was loaded from another one's checkpoint."""
    fabric = new_fabric(strategy)
    net = Stateful()
    model = fabric.setup(net)
    model(fabric.to_device(torch.ones(2, FEATURES)))
    net.total.update(12.0)
    fabric.save(path, {"model": model})
    loaded = Stateful()
    fabric.load(path, {"model": fabric.setup(loaded)})
    return loaded.count, float(loaded.total.sum_value)


class ClampedLinear(nn.Linear):
    """Constrains its weight in its own forward pass, as some layers of convolutional models do."""

    assigns = False

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.weight.data = self.weight.data.clamp(-0.2, 0.2)
        else:
            self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Clamped(Lit):
    """Clamps its weights, like the critic of a WGAN: in its training step, or in a hook after it.

    Args:
        moment: ``"in a step"`` before its forward pass, ``"in a step of rank 1"`` on it alone, ``"in a step by hand"``
            after the optimizer's step, ``"after a step"`` or ``"after a step by hand"``; ``"in a layer"`` in the
            forward pass of one layer of the first block, ``"in a layer that assigns"`` by an assignment to ``.data``.
    """

    def __init__(self, moment: str) -> None:
        super().__init__("sgd")
        self.moment = moment
        if moment.startswith("in a layer"):
            block: Any = self.net.blocks[0]
            layer = ClampedLinear(block.up.in_features, block.up.out_features)
            layer.load_state_dict(block.up.state_dict())
            layer.assigns = moment == "in a layer that assigns"
            block.up = layer
        self.automatic_optimization = not moment.endswith("by hand")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        is_rank_1_alone = self.moment == "in a step of rank 1" and self.global_rank == 1
        if self.moment == "in a step" or is_rank_1_alone:
            self.clamp()
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.step_by_hand(loss)
        if self.moment == "in a step by hand":
            self.clamp()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.moment.startswith("after"):
            self.clamp()

    def clamp(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def _train_clamped(strategy: str, tmp: str, moment: str) -> Trained | str:
    return result_or_refusal(ShardingError, partial(fit_module, strategy, tmp, Clamped(moment), 3))


class ClampedNet(Gains):
    """Clamps its weights in each forward pass in training, as some layers do."""

    def forward(self, x: Tensor, use_second: bool = True) -> Tensor:
        if self.training:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        return super().forward(x, use_second)


class Teacher(Lit):
    """Has a copy that follows it, and a codebook, and writes to both inside steps, as BYOL and VQ-VAE do.

    Args:
        by_hand: Whether it steps by hand.
    """

    step_counts: Tensor

    def __init__(self, by_hand: bool) -> None:
        super().__init__("sgd")
        self.automatic_optimization = not by_hand
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, FEATURES), requires_grad=False)
        self.register_buffer("step_counts", torch.zeros(FEATURES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, _ = batch
        self.update_teacher()  # the first time, they are equal
        with torch.no_grad():
            teacher_output = self.teacher(x)
        if batch_idx > 0:
            self.update_teacher()
        loss = super().training_step(batch, batch_idx) + mse_loss(self.net(x), teacher_output)
        with torch.no_grad():
            self.codes[batch_idx % 3] = 0.5
            self.codes.mul_(0.9)
            self.step_counts += 1.0
        for average, parameter in self.averages():
            average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        if self.automatic_optimization:
            return loss
        self.step_by_hand(loss)
        self.update_teacher()
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])
        self.update_teacher(0.5)

    @torch.no_grad()
    def update_teacher(self, share: float = 0.1) -> None:
        for average, parameter in self.averages():
            average.lerp_(parameter, share)

    def averages(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The teacher's parameters, each with that of the model."""
        return zip(self.teacher.parameters(), self.net.parameters(), strict=True)


def _train_with_teacher(strategy: str, tmp: str, by_hand: bool) -> Trained | str:
    # RuntimeError too, which torch_xla raises: its parameters are shards also inside a step.
    errors = (ShardingError, RuntimeError)
    return result_or_refusal(errors, partial(fit_module, strategy, tmp, Teacher(by_hand), 3, validation_steps=1))


#: Ways in which a step computes with parameters outside of their unit.
USES = ("other weights of a block", "other weights of the root's", "a penalty", "a norm in a hook")


class UsesOfParameters(Lit):
    """Computes with parameters outside of the module that they belong to.

    Args:
        use: One of :data:`USES`.
    """

    def __init__(self, use: str) -> None:
        super().__init__("sgd")
        self.use = use
        self.norms: list[float] = []
        self.block_weights = {name: p.detach() * 2.0 for name, p in self.net.blocks[0].named_parameters()}
        self.root_weights = {name: p.detach() * 2.0 for name, p in self.net.inp.named_parameters()}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        x = self.net.inp(batch[0])
        if self.use == "other weights of a block":
            loss = loss + torch.func.functional_call(self.net.blocks[0], self.block_weights, (x,)).square().mean()
        elif self.use == "other weights of the root's":
            loss = loss + torch.func.functional_call(self.net.inp, self.root_weights, (batch[0],)).square().mean()
        elif self.use == "a penalty":
            loss = loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        self.losses[-1] = loss.detach()
        return loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.use == "a norm in a hook":
            total: Any = sum(parameter.detach().norm() for parameter in self.parameters())
            if hasattr(total, "full_tensor"):  # a DTensor
                total = total.full_tensor()
            self.norms.append(float(total))


def _train_with_uses(strategy: str, tmp: str) -> dict[str, Trained | str]:
    """By use, the losses and norms with the state, or the error."""
    # RuntimeError too, which torch raises where DTensors and plain tensors are mixed.
    errors = (ShardingError, UnsupportedCapabilityError, RuntimeError)

    def train(use: str) -> Trained:
        module = UsesOfParameters(use)
        losses, state = fit_module(strategy, tmp, module, 2)
        losses_and_norms = [*losses, *module.norms]
        return losses_and_norms, state

    return {use: result_or_refusal(errors, partial(train, use)) for use in USES}


def _train_clamped_in_forward(strategy: str, clamping_rank: int | None) -> Trained | str:
    """Train a net that clamps its weights on one rank, or on all if ``None``."""
    loop = Loop(strategy, oracle.sgd, ClampedNet())
    loop.model.eval()
    x, _ = loop.whole_batches(1)[0]
    with torch.no_grad():
        loop.model(x)  # not watched for writes, since it trains nothing
    clamps = clamping_rank is None or clamping_rank == loop.fabric.global_rank
    loop.model.train(clamps)
    return result_or_refusal(ShardingError, lambda: loop.train(loop.batches(3)))


def _step_in_backward(strategy: str) -> Trained | str:
    """Train by an optimizer for each parameter, which steps in a hook of its gradient; or the error message."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model = fabric.setup(net)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in net.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    try:
        for parameter in optimizers:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(step)
    except UnsupportedCapabilityError as error:
        return str(error)
    losses = []
    for batch in oracle.global_batches(2):
        x, y = own_share(fabric, batch)
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
    return means(losses), full_state(fabric.strategy)


def _assert_refused_on_both(outcomes: list[Trained | str]) -> None:
    """Assert that both ranks were refused what rank 1 has written by itself."""
    first, second = outcomes
    assert isinstance(first, str), "a rank that writes to weights by itself is not told"
    assert first == second, "only the rank that writes gets the error"
    assert_says(first, "written to", "on rank 1")


class ParametersSuite(Clauses):
    """Losses and state equal the oracle's with special parameters, too."""

    @pytest.mark.parametrize(
        "scenario", [UNFROZEN, pytest.param(UNUSED, marks=requires(Capability.GRADIENT_ACCUMULATION))]
    )
    def test_whole_parameters_stay_equal(self, ranks: Ranks, scenario: str) -> None:
        """0-dim parameters must be the same on every rank, and equal to the unsharded model's."""
        first, second = ranks.run(2, _train_gains, self.strategy, scenario)
        assert first == second
        assert first == pytest.approx(_train_gains(None, scenario), abs=FP32_TOLERANCE)

    @precisions("32-true", "bf16-mixed")
    def test_a_block_unfrozen_later(self, ranks: Ranks, precision: str) -> None:
        """A block that is unfrozen between two steps must be trained from then on."""
        tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
        for losses in ranks.run(2, _unfreeze_later, self.strategy, precision):
            assert losses == pytest.approx(_unfreeze_later(None), rel=tolerance, abs=tolerance)

    def test_a_block_unfrozen_after_an_evaluation(self, ranks: Ranks) -> None:
        """A block that is unfrozen after a forward pass under ``no_grad`` must be trained from then on."""
        evaluate_first = True
        for losses in ranks.run(2, _unfreeze_later, self.strategy, None, evaluate_first):
            assert losses == pytest.approx(_unfreeze_later(None), abs=FP32_TOLERANCE)

    @requires(Capability.CLIP_BY_NORM)
    @precisions("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    def test_batch_norm(self, ranks: Ranks, precision: str) -> None:
        """Batch norm must train under every precision, with the same state on every rank."""
        want, want_state = oracle.train_plain(3, oracle.momentum, net=Normed())
        first, second = ranks.run(2, _train_with_batch_norm, self.strategy, precision)
        losses, state = first
        other_losses, other_state = second
        tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
        assert losses == other_losses
        assert losses == pytest.approx(want, rel=tolerance, abs=tolerance)
        assert torch.equal(state["norm.weight"], other_state["norm.weight"])
        assert state.keys() == want_state.keys()
        tracked = state["norm.num_batches_tracked"]
        assert tracked == 3, f"the batch norm has counted {tracked} batches instead of 3"

    @requires(Capability.CLIP_BY_NORM)
    def test_running_statistics(self, ranks: Ranks) -> None:
        """The running statistics of a batch norm must be in the state, and equal plain torch's."""
        _, want = oracle.train_plain(3, oracle.momentum, net=Normed())
        for _, state in ranks.run(2, _train_with_batch_norm, self.strategy, "32-true"):
            for name in ("norm.running_mean", "norm.running_var"):
                torch.testing.assert_close(state[name], want[name], atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_extra_state_and_persistent_metrics_are_restored(self, ranks: Ranks, tmp_path: Path) -> None:
        """``get_extra_state()`` and persistent torchmetrics states must be saved and restored."""
        assert ranks.run(2, _restore_extra_state, self.strategy, str(tmp_path / "checkpoint")) == [(1, 12.0)] * 2

    @pytest.mark.parametrize(
        "moment",
        [
            "in a step",
            pytest.param("in a step by hand", marks=requires(Capability.MANUAL_OPTIMIZATION)),
            "in a layer",
            "in a layer that assigns",
            "after a step",
            pytest.param("after a step by hand", marks=requires(Capability.MANUAL_OPTIMIZATION)),
        ],
    )
    def test_weights_that_are_clamped(self, ranks: Ranks, tmp_path: Path, moment: str) -> None:
        """Writes to weights in a hook after a step must be kept. Writes inside a step must be kept, or refused.

        Those of a layer of a unit are seen when the unit has computed, before it frees what was written.
        """
        want = fit_plainly(tmp_path, Clamped(moment), 3)
        outcomes = ranks.run(2, _train_clamped, self.strategy, str(tmp_path), moment)
        if moment == "in a step" and ranks.kind == "processes":
            _assert_refused_on_both(ranks.run(2, _train_clamped, self.strategy, str(tmp_path), "in a step of rank 1"))
        if moment.startswith("after"):
            for outcome in outcomes:
                assert not isinstance(outcome, str), outcome
        assert_same_or_refused(outcomes, want, "written to", "rite in on_train_batch_end()")

    @on_ranks("processes")  # of threads, one that raises leaves the others waiting
    def test_computing_with_parameters_from_elsewhere(self, ranks: Ranks, tmp_path: Path) -> None:
        """What a step computes of parameters outside of their unit must be as in one process, or raise."""
        for outcomes in ranks.run(2, _train_with_uses, self.strategy, str(tmp_path)):
            for use, outcome in outcomes.items():
                if isinstance(outcome, str):
                    assert was_refused(outcome), outcome
                    if use == "other weights of a block":
                        words = ("was replaced by another tensor", "functional_call()", "auto_wrap_policy=None")
                        assert_says(outcome, *words)
                    continue
                module = UsesOfParameters(use)
                losses, want = fit_plainly(tmp_path, module, 2)
                losses_and_norms, state = outcome
                assert losses_and_norms == pytest.approx([*losses, *module.norms], abs=1e-4), use
                assert_state_close(state, want)

    @pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=requires(Capability.MANUAL_OPTIMIZATION))])
    def test_averages_and_codebooks_inside_steps(self, ranks: Ranks, tmp_path: Path, by_hand: bool) -> None:
        """A teacher that follows the model, and a codebook, must be as in one process, or refused.

        They are written to before, between and after forward passes, and in a validation.
        """
        want = fit_plainly(tmp_path, Teacher(by_hand), 3, validation_steps=1)
        outcomes = ranks.run(2, _train_with_teacher, self.strategy, str(tmp_path), by_hand)
        words = ("written to", "Write in on_train_batch_end()") if ranks.kind == "processes" else ()
        assert_same_or_refused(outcomes, want, *words)

    def test_weights_that_a_forward_pass_clamps_under_fabric(self, ranks: Ranks) -> None:
        """Writes to weights in a forward pass must be kept, or refused on all ranks before an optimizer's step."""
        want = oracle.train_plain(3, oracle.sgd, net=ClampedNet())
        outcomes = ranks.run(2, _train_clamped_in_forward, self.strategy, None)
        words = ("a forward pass of ClampedNet has written to", "after optimizer.step()", "fsdp_core.gathered")
        assert_same_or_refused(outcomes, want, *words)
        if ranks.kind == "processes":
            _assert_refused_on_both(ranks.run(2, _train_clamped_in_forward, self.strategy, 1))

    def test_hooks_of_gradients(self, ranks: Ranks) -> None:
        """A hook on a shard must be called with its reduced gradient, once per reduction, or be refused."""
        want = oracle.train_plain(2, oracle.sgd)
        outcomes = each_ranks(ranks, ranks.run(2, _step_in_backward, self.strategy))
        assert_same_or_refused(outcomes, want, "is sharded", "on_before_optimizer_step()")
