"""Special parameters and state: 0-dim and frozen parameters, batch norm, state that is not a tensor."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchmetrics import SumMetric

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks, precisions, requires
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, loader, losses_of, means, new_fabric, new_trainer, own_share, whole_batches

__all__ = ["Gains", "ParametersSuite", "gains_of"]


UNFROZEN, UNUSED = "unfrozen later", "unused in the last micro-batch"


class Gains(nn.Module):
    """Two 0-dim parameters. A forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.layer = nn.Linear(FEATURES, FEATURES)
        self.one, self.two = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, use_two: bool = True) -> Tensor:
        x = self.layer(x) * self.one
        return x * self.two if use_two else x


def _gains_oracle(scenario: str) -> dict[str, float]:
    net = Gains()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = oracle.global_batches(3)
    if scenario == UNFROZEN:
        (mse_loss(net.layer(batches[0][0]) * net.one.detach() * net.two.detach(), batches[0][1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        batches = batches[1:]
    else:
        for i, (x, y) in enumerate(batches):
            mse_loss(net(x, use_two=i < 2), y).backward()
        optimizer.step()
        return {"one": net.one.item(), "two": net.two.item()}
    for x, y in batches:
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"one": net.one.item(), "two": net.two.item()}


def gains_of(strategy: Any) -> dict[str, float]:
    """The current values of the root's two 0-dim parameters. A collective: all ranks must call it."""
    state = full_state(strategy)
    return {name: state[name].item() for name in ("one", "two")}


def _gains(strategy: str, scenario: str) -> dict[str, float]:
    fabric = new_fabric(strategy)
    net = Gains()
    if scenario == UNFROZEN:
        net.one.requires_grad_(False)
        net.two.requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = [own_share(fabric, batch) for batch in oracle.global_batches(3)]
    if scenario == UNUSED:
        for i, (x, y) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=i < 2):
                fabric.backward(mse_loss(model(x, use_two=i < 2), y))
        optimizer.step()
        return gains_of(fabric.strategy)
    for i, (x, y) in enumerate(batches):
        if i == 1:
            net.one.requires_grad_(True)
            net.two.requires_grad_(True)
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return gains_of(fabric.strategy)


def _unfrozen_oracle() -> list[float]:
    net = oracle.new_net()
    net.blocks[1].requires_grad_(False)
    optimizer = oracle.sgd(net)
    losses = []
    for i, (x, y) in enumerate(oracle.global_batches(3)):
        net.blocks[1].requires_grad_(i > 0)
        loss = mse_loss(net(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _unfrozen(strategy: str, precision: Any, evaluated: bool = False) -> list[float]:
    fabric = new_fabric(strategy, precision=precision)
    net = oracle.new_net()
    net.blocks[1].requires_grad_(False)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for i, (x, y) in enumerate(whole_batches(fabric, 3)):
        if i == 1 and evaluated:
            with torch.no_grad():
                model(x)
        if i == 1:
            net.blocks[1].requires_grad_(True)
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Normed(nn.Module):
    """A model with a batch norm, which must not compute in half precision."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.inp, self.norm, self.out = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.relu(self.norm(self.inp(x))))


def _batch_norm(strategy: str, precision: Any) -> tuple[list[float], dict[str, Tensor]]:
    fabric = new_fabric(strategy, precision=precision)
    net = Normed()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for x, y in whole_batches(fabric, 3):  # the same batch on both ranks, so that statistics equal the oracle's
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_state(fabric.strategy)


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


def _extra_state(strategy: str, path: str) -> tuple[int, float]:
    fabric = new_fabric(strategy)
    net = Stateful()
    model = fabric.setup(net)
    model(fabric.to_device(torch.ones(2, FEATURES)))
    net.total.update(12.0)
    fabric.save(path, {"model": model})
    other = Stateful()
    fabric.load(path, {"model": fabric.setup(other)})
    return other.count, float(other.total.sum_value)


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
        where: ``"in a step"`` before its forward pass, ``"in a step of rank 1"`` on it alone, ``"in a step by hand"``
            after the optimizer's step, ``"after a step"`` or ``"after a step by hand"``; ``"in a layer"`` in the
            forward pass of one layer of the first block, ``"in a layer that assigns"`` by an assignment to ``.data``.
    """

    def __init__(self, where: str) -> None:
        super().__init__("sgd")
        self.where = where
        if where.startswith("in a layer"):
            block: Any = self.net.blocks[0]
            layer = ClampedLinear(block.up.in_features, block.up.out_features)
            layer.load_state_dict(block.up.state_dict())
            layer.assigns = where == "in a layer that assigns"
            block.up = layer
        self.automatic_optimization = not where.endswith("by hand")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.where == "in a step" or (self.where == "in a step of rank 1" and self.global_rank == 1):
            self.clamp()
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if self.where == "in a step by hand":
            self.clamp()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where.startswith("after"):
            self.clamp()

    def clamp(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def _clamped(strategy: str, tmp: str, where: str) -> Trained | str:
    module = Clamped(where)
    run = new_trainer(tmp, strategy, 2)
    said = refusal(ShardingError, partial(run.fit, module, loader(3, 2)))
    return said if was_refused(said) else (means(module.losses), full_state(run.strategy))


class ClampedNet(Gains):
    """Clamps its weights in each forward pass in training, as some layers do."""

    def forward(self, x: Tensor, use_two: bool = True) -> Tensor:
        if self.training:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        return super().forward(x, use_two)


class Teacher(Lit):
    """Has a copy that follows it, and a codebook, and writes to both inside steps, as BYOL and VQ-VAE do.

    Args:
        by_hand: Whether it steps by hand.
    """

    seen: Tensor

    def __init__(self, by_hand: bool) -> None:
        super().__init__("sgd")
        self.automatic_optimization = not by_hand
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, FEATURES), requires_grad=False)
        self.register_buffer("seen", torch.zeros(FEATURES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.follow()  # the first time, they are equal
        with torch.no_grad():
            taught = self.teacher(batch[0])
        if batch_idx:
            self.follow()
        loss = super().training_step(batch, batch_idx) + mse_loss(self.net(batch[0]), taught)
        with torch.no_grad():
            self.codes[batch_idx % 3] = 0.5
            self.codes.mul_(0.9)
            self.seen += 1.0
        for average, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.follow()
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])
        self.follow(0.5)

    @torch.no_grad()
    def follow(self, share: float = 0.1) -> None:
        for average, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            average.lerp_(parameter, share)


def _taught(strategy: str, tmp: str, by_hand: bool) -> Trained | str:
    module = Teacher(by_hand)
    run = new_trainer(tmp, strategy, 2)
    # torch_xla's own error too, whose parameters are shards also inside a step
    said = refusal((ShardingError, RuntimeError), partial(run.fit, module, loader(3, 2), loader(1, 2)))
    assert was_refused(said) or said.endswith("nothing was raised"), said
    return said if was_refused(said) else (means(module.losses), full_state(run.strategy))


#: What steps compute of parameters that a unit may hold in pieces.
OF_PIECES = ("other weights of a block", "other weights of the root's", "a penalty", "a norm in a hook")


class OfPieces(Lit):
    """Computes with parameters outside of the module that they belong to.

    Args:
        what: One of :data:`OF_PIECES`.
    """

    def __init__(self, what: str) -> None:
        super().__init__("sgd")
        self.what = what
        self.norms: list[float] = []
        self.others = {name: p.detach() * 2.0 for name, p in self.net.blocks[0].named_parameters()}
        self.of_root = {name: p.detach() * 2.0 for name, p in self.net.inp.named_parameters()}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        x = self.net.inp(batch[0])
        if self.what == "other weights of a block":
            loss = loss + torch.func.functional_call(self.net.blocks[0], self.others, (x,)).square().mean()
        elif self.what == "other weights of the root's":
            loss = loss + torch.func.functional_call(self.net.inp, self.of_root, (batch[0],)).square().mean()
        elif self.what == "a penalty":
            loss = loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        self.losses[-1] = loss.detach()
        return loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.what == "a norm in a hook":
            total: Any = sum(parameter.detach().norm() for parameter in self.parameters())
            self.norms.append(float(total.full_tensor() if hasattr(total, "full_tensor") else total))


def _of_pieces(strategy: str, tmp: str) -> dict[str, Trained | str]:
    outcomes: dict[str, Trained | str] = {}
    for what in OF_PIECES:
        module = OfPieces(what)
        run = new_trainer(tmp, strategy, 2)
        fit = partial(run.fit, module, loader(2, 2))
        # torch's own errors too: DTensors and plain tensors don't mix
        said = refusal((ShardingError, UnsupportedCapabilityError, RuntimeError), fit)
        if was_refused(said):
            outcomes[what] = said
            continue
        assert said.endswith("nothing was raised"), said
        outcomes[what] = [*means(module.losses), *module.norms], full_state(run.strategy)
    return outcomes


def _clamped_in_forward(strategy: str, of_rank: int | None) -> tuple[str, Trained]:
    fabric = new_fabric(strategy)
    net = ClampedNet()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    model.eval()
    with torch.no_grad():
        model(fabric.to_device(oracle.global_batches(1)[0][0]))  # is not watched: it trains nothing
    model.train(of_rank is None or fabric.global_rank == of_rank)
    losses: list[Tensor] = []

    def train() -> None:
        for batch in oracle.global_batches(3):
            x, y = own_share(fabric, batch)
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    said = refusal(ShardingError, train)
    return said, ([], {}) if was_refused(said) else (means(losses), full_state(fabric.strategy))


def _stepping_in_backward(strategy: str) -> Trained | str:
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
    except UnsupportedCapabilityError as refused:
        return str(refused)
    losses = []
    for batch in oracle.global_batches(2):
        x, y = own_share(fabric, batch)
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
    return means(losses), full_state(fabric.strategy)


class ParametersSuite(Clauses):
    """Losses and state equal the oracle's with special parameters, too."""

    @pytest.mark.parametrize(
        "scenario", [UNFROZEN, pytest.param(UNUSED, marks=requires(Capability.GRADIENT_ACCUMULATION))]
    )
    def test_whole_parameters_stay_equal(self, ranks: Ranks, scenario: str) -> None:
        """0-dim parameters must be the same on every rank, and equal to the unsharded model's."""
        first, second = ranks.run(2, _gains, self.strategy, scenario)
        assert first == second
        assert first == pytest.approx(_gains_oracle(scenario), abs=FP32_TOLERANCE)

    @precisions("32-true", "bf16-mixed")
    def test_a_block_unfrozen_later(self, ranks: Ranks, precision: str) -> None:
        """A block that is unfrozen between two steps must be trained from then on."""
        tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
        for losses in ranks.run(2, _unfrozen, self.strategy, precision):
            assert losses == pytest.approx(_unfrozen_oracle(), rel=tolerance, abs=tolerance)

    def test_a_block_unfrozen_after_an_evaluation(self, ranks: Ranks) -> None:
        """A block that is unfrozen after a forward pass under ``no_grad`` must be trained from then on."""
        for losses in ranks.run(2, _unfrozen, self.strategy, None, True):
            assert losses == pytest.approx(_unfrozen_oracle(), abs=FP32_TOLERANCE)

    @requires(Capability.CLIP_BY_NORM)
    @precisions("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    def test_batch_norm(self, ranks: Ranks, precision: str) -> None:
        """Batch norm must train under every precision, with the same state on every rank."""
        want, want_state = oracle.train_plain(3, oracle.momentum, net=Normed())
        (losses, state), (others, other_state) = ranks.run(2, _batch_norm, self.strategy, precision)
        tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
        assert losses == others
        assert losses == pytest.approx(want, rel=tolerance, abs=tolerance)
        assert torch.equal(state["norm.weight"], other_state["norm.weight"])
        assert state.keys() == want_state.keys()
        tracked = state["norm.num_batches_tracked"]
        assert tracked == 3, f"the batch norm has counted {tracked} batches instead of 3"

    @requires(Capability.CLIP_BY_NORM)
    def test_running_statistics(self, ranks: Ranks) -> None:
        """The running statistics of a batch norm must be in the state, and equal plain torch's."""
        _, want = oracle.train_plain(3, oracle.momentum, net=Normed())
        for _, state in ranks.run(2, _batch_norm, self.strategy, "32-true"):
            for name in ("norm.running_mean", "norm.running_var"):
                torch.testing.assert_close(state[name], want[name], atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_extra_state_and_persistent_metrics_are_restored(self, ranks: Ranks, tmp_path: Path) -> None:
        """``get_extra_state()`` and persistent torchmetrics states must be saved and restored."""
        assert ranks.run(2, _extra_state, self.strategy, str(tmp_path / "checkpoint")) == [(1, 12.0)] * 2

    @pytest.mark.parametrize(
        "where",
        [
            "in a step",
            pytest.param("in a step by hand", marks=requires(Capability.MANUAL_OPTIMIZATION)),
            "in a layer",
            "in a layer that assigns",
            "after a step",
            pytest.param("after a step by hand", marks=requires(Capability.MANUAL_OPTIMIZATION)),
        ],
    )
    def test_weights_that_are_clamped(self, ranks: Ranks, tmp_path: Path, where: str) -> None:
        """Writes to weights in a hook after a step must be kept. Writes inside a step must be kept, or refused.

        Those of a layer of a unit are seen when the unit has computed, before it frees what was written.
        """
        plain = Clamped(where)
        new_trainer(tmp_path, "auto").fit(plain, loader(3, 1))
        outcomes = ranks.run(2, _clamped, self.strategy, str(tmp_path), where)
        if where == "in a step" and ranks.kind == "processes":
            of_one = ranks.run(2, _clamped, self.strategy, str(tmp_path), "in a step of rank 1")
            assert all(isinstance(one, str) for one in of_one), "a rank that writes to weights by itself is not told"
            assert of_one[0] == of_one[1], "only the rank that writes gets the error"
            assert_says(str(of_one[0]), "written to", "on rank 1")
        for outcome in outcomes:
            if isinstance(outcome, str):
                assert where.startswith("in"), outcome
                assert_says(outcome, "written to", "rite in on_train_batch_end()")
            else:
                losses, state = outcome
                assert losses == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)
                for name, tensor in plain.state_dict().items():
                    torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)

    @on_ranks("processes")  # of threads, one that raises leaves the others waiting
    def test_computing_with_parameters_from_elsewhere(self, ranks: Ranks, tmp_path: Path) -> None:
        """What a step computes of parameters outside of their unit must be as in one process, or raise."""
        for outcomes in ranks.run(2, _of_pieces, self.strategy, str(tmp_path)):
            for what, outcome in outcomes.items():
                if isinstance(outcome, str):
                    if what == "other weights of a block":
                        assert_says(
                            outcome, "was replaced by another tensor", "functional_call()", "auto_wrap_policy=None"
                        )
                    continue
                plain = OfPieces(what)
                new_trainer(tmp_path, "auto").fit(plain, loader(2, 1))
                numbers, state = outcome
                assert numbers == pytest.approx([*losses_of(plain), *plain.norms], abs=1e-4), what
                for name, tensor in plain.state_dict().items():
                    told = f"{what}: {name}"
                    torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=told)

    @pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=requires(Capability.MANUAL_OPTIMIZATION))])
    def test_averages_and_codebooks_inside_steps(self, ranks: Ranks, tmp_path: Path, by_hand: bool) -> None:
        """A teacher that follows the model, and a codebook, must be as in one process, or refused.

        They are written to before, between and after forward passes, and in a validation.
        """
        plain = Teacher(by_hand)
        new_trainer(tmp_path, "auto").fit(plain, loader(3, 1), loader(1, 1))
        for outcome in ranks.run(2, _taught, self.strategy, str(tmp_path), by_hand):
            if isinstance(outcome, str):
                if ranks.kind == "processes":
                    assert_says(outcome, "written to", "Write in on_train_batch_end()")
                continue
            losses, state = outcome
            assert losses == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)
            for name, tensor in plain.state_dict().items():
                torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)

    def test_weights_that_a_forward_pass_clamps_under_fabric(self, ranks: Ranks) -> None:
        """Writes to weights in a forward pass must be kept, or refused on all ranks before an optimizer's step."""
        want = oracle.train_plain(3, oracle.sgd, net=ClampedNet())
        outcomes = ranks.run(2, _clamped_in_forward, self.strategy, None)
        for said, trained in outcomes:
            if was_refused(said):
                assert_says(
                    said, "a forward pass of ClampedNet has written to", "after optimizer.step()", "fsdp_core.gathered"
                )
            else:
                assert_same([trained], want)
        if ranks.kind == "processes":
            first, second = ranks.run(2, _clamped_in_forward, self.strategy, 1)
            assert was_refused(first[0]), "a rank that writes to weights by itself is not told"
            assert first == second, "only the rank that writes gets the error"
            assert_says(first[0], "has written to", "on rank 1")

    def test_hooks_of_gradients(self, ranks: Ranks) -> None:
        """A hook on a shard must be called with its reduced gradient, once per reduction, or be refused."""
        want = oracle.train_plain(2, oracle.sgd)
        for outcome in each_ranks(ranks, ranks.run(2, _stepping_in_backward, self.strategy)):
            if isinstance(outcome, str):
                assert_says(outcome, "is sharded", "on_before_optimizer_step()")
            else:
                assert_same([outcome], want)
