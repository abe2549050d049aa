"""Manual optimization: backward passes and steps inside one forward pass of the root, in any order."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Block, Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_trained_alike, fit_module
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, means, new_trainer
from native_runs import FLAT, HYBRID, SHARD_GRAD_OP, WHOLE, show_parameter

#: Every parameter is in one of these units, unless the root has one of its own.
IN_UNITS: dict[str, Any] = {"auto_wrap_policy": {oracle.Net, Block, nn.Sequential}}


class Gan(Lit):
    """A net, a critic in units of its own, a parameter of the root, and an optimizer for each of the two.

    Args:
        mode: ``"one by one"``: each loss is computed, and its optimizer stepped, before the next;
            ``"both"``: both are computed, then taken back, then stepped; ``"closure"``: the optimizer asks for one.
        gated: Whether the root's gate is a parameter; it is a buffer otherwise.
    """

    def __init__(self, mode: str = "one by one", gated: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mode = mode
        torch.manual_seed(3)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
        self.gate: Any
        if gated:
            self.gate = nn.Parameter(torch.ones(FEATURES))
        else:
            self.register_buffer("gate", torch.ones(FEATURES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        modes = {"one by one": self.one_by_one, "zeroed last": self.one_by_one, "both": self.both}
        losses = modes.get(self.mode, self.closure)(*batch)
        self.losses += [loss.detach() for loss in losses]

    def one_by_one(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.optimizers()
        last = self.mode == "zeroed last"
        with nullcontext() if last else self.toggled_optimizer(first):
            loss = mse_loss(self.net(x * self.gate), y) + self.critic(self.net(x)).mean()
            if not last:
                first.zero_grad()
            self.manual_backward(loss)
            first.step()
            if last:
                first.zero_grad()
        with nullcontext() if last else self.toggled_optimizer(second):
            critic_loss = (self.critic(self.net(x).detach() * self.gate) ** 2).mean()
            if not last:
                second.zero_grad()
            self.manual_backward(critic_loss)
            self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            second.step()
            if last:
                second.zero_grad()
        return loss, critic_loss

    def both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.optimizers()
        output = self.net(x * self.gate)
        loss = mse_loss(output, y)
        critic_loss = (self.critic(output.detach()) ** 2).mean() + (self.critic(y) ** 2).mean()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(critic_loss)
        self.manual_backward(loss)
        first.step()
        second.step()
        return loss, critic_loss

    def closure(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.optimizers()
        seen = []

        def compute() -> Tensor:
            first.zero_grad()
            loss = mse_loss(self.net(x * self.gate), y)
            self.manual_backward(loss)
            seen.append(loss)
            return loss

        first.step(closure=compute)
        critic_loss = (self.critic(self.net(x).detach()) ** 2).mean()
        second.zero_grad()
        self.manual_backward(critic_loss)
        second.step()
        return seen[-1], critic_loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD([*self.net.parameters(), *self.parameters(recurse=False)], lr=0.05, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.01, eps=1e-3),
        ]


MODES = ["one by one", "zeroed last", "both", "closure"]


@pytest.mark.parametrize(
    ("mode", "options", "run"),
    [
        *((mode, options, {}) for mode in MODES for options in ({}, FLAT, WHOLE)),
        *((mode, {"auto_wrap_policy": None}, {}) for mode in ("one by one", "closure")),
        *((mode, {"auto_wrap_policy": {Block, nn.Linear}}, {}) for mode in ("zeroed last", "both")),
        *((mode, SHARD_GRAD_OP, {}) for mode in ("one by one", "both")),
        *((mode, {**FLAT, **WHOLE}, {}) for mode in ("zeroed last", "closure")),
        *((mode, {"backward_prefetch": None}, {}) for mode in ("one by one", "both")),
        *((mode, options, {"ranks": n}) for mode in MODES for n, options in ((1, {}), (1, FLAT), (3, {}))),
        *((mode, HYBRID, {"ranks": 4}) for mode in ("one by one", "both")),
        # a root that has nothing to gather, whose units still wait for backward passes inside its forward pass
        *((mode, IN_UNITS, {"gated": False}) for mode in ("one by one", "both")),
        *((mode, {}, {"precision": precision}) for mode in MODES for precision in ("bf16-mixed", "16-mixed")),
        *(("both", options, {"precision": "bf16-mixed"}) for options in (FLAT, WHOLE)),
        ("one by one", FLAT, {"precision": "16-mixed"}),
    ],
    ids=show_parameter,
)
def test_losses_and_weights_equal_plain(
    ranks: RankPool, tmp_path: Path, mode: str, options: dict[str, Any], run: dict[str, Any]
) -> None:
    """Also on other numbers of ranks, over replicas, and in half precision."""
    new_module = partial(Gan, mode, run.get("gated", True))
    want = fit_module(new_module, "auto", str(tmp_path), 1, 3)
    world_size, precision = run.get("ranks", 2), run.get("precision")
    loop: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # a scale from which no step overflows, so that none is left out
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        loop = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    arguments = ("fsdp_native", str(tmp_path), world_size, 3, options, loop, True)
    got = ranks.run(world_size, fit_module, new_module, *arguments)
    assert_moved_alike(got, want, FP32_TOLERANCE if precision is None else HALF_TOLERANCE)


def refused_prefetch(tmp: str) -> str:
    run = new_trainer(tmp, "fsdp_native", 2, {"forward_prefetch": True})
    return refusal(UnsupportedCapabilityError, lambda: run.fit(Gan("both"), loader(3, 2)))


def test_forward_prefetch_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """It would use units that were gathered before a step."""
    for message in ranks.run(2, refused_prefetch, str(tmp_path)):
        assert_says(message, "forward_prefetch=True", "manual optimization", "Leave forward_prefetch out")


def assert_moved_alike(got: list[Trained], want: Trained, tolerance: float = FP32_TOLERANCE) -> None:
    """Also that everything has moved that moves in one process, by about as much."""
    start = Gan().state_dict()
    for losses, state in got:
        assert losses == pytest.approx(want[0], rel=tolerance, abs=tolerance)
        assert state.keys() == want[1].keys()
        for name, tensor in want[1].items():
            moved = (tensor - start[name]).abs().max().item()
            if tolerance == FP32_TOLERANCE:
                torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=tolerance, msg=name)
            elif moved > 1e-3:
                step = (state[name] - start[name] - (tensor - start[name])).abs().max().item()
                assert step < 0.3 * moved, f"{name} moved otherwise, by {step} of {moved}"


# -- writes to what the optimizer holds, between two passes ------------------------------------------------------------


class Sharpness(Lit):
    """Climbs along the gradient, of what has one, and goes back before the step, as published code does it.

    Args:
        trains_output: Whether the optimizer holds the last layer alone: of some parameters a rank then has no element.
        in_data: Whether it climbs through ``.data``.
        assigns: Whether it goes back by an assignment to ``.data``.
    """

    def __init__(self, trains_output: bool, in_data: bool, assigns: bool) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False
        self.trains_output, self.in_data, self.assigns = trains_output, in_data, assigns
        torch.manual_seed(5)
        self.last = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.take_back(batch)
        before = {}
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                before[parameter] = parameter.data.clone()
                with torch.no_grad():
                    (parameter.data if self.in_data else parameter).add_(parameter.grad, alpha=0.1)
        optimizer.zero_grad()
        self.take_back(batch)
        for parameter, values in before.items():
            if self.assigns:
                parameter.data = values
            else:
                parameter.data.copy_(values)
        optimizer.step()
        optimizer.zero_grad()
        self.take_back(batch)
        optimizer.zero_grad()

    def take_back(self, batch: tuple[Tensor, Tensor]) -> None:
        loss = mse_loss(self.last(self.net(batch[0])), batch[1])
        self.manual_backward(loss)
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        trained = self.last if self.trains_output else self
        return torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@pytest.mark.parametrize("options", [{}, SHARD_GRAD_OP, WHOLE], ids=show_parameter)
@pytest.mark.parametrize(
    ("trains_output", "in_data", "assigns"),
    [(False, False, True), (True, False, True), (False, True, False), (True, True, False)],
    ids=["assigned", "assigned, some ranks have none", "in data", "in data, some ranks have none"],
)
def test_writes_between_two_passes(
    ranks: RankPool, tmp_path: Path, trains_output: bool, in_data: bool, assigns: bool, options: dict[str, Any]
) -> None:
    new_module = partial(Sharpness, trains_output, in_data, assigns)
    want = fit_module(new_module, "auto", str(tmp_path), 1, 2)
    got = ranks.run(2, fit_module, new_module, "fsdp_native", str(tmp_path), 2, 2, options, {}, True)
    assert_trained_alike(got, want)


# -- a unit that is used more than once --------------------------------------------------------------------------------


class BlocksTwice(Lit):
    """Every block is called twice in a row, and the first one a third time."""

    def __init__(self, automatic: bool) -> None:
        super().__init__("momentum")
        self.automatic_optimization = automatic

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        hidden = self.net.inp(x)
        for block in self.net.blocks:
            hidden = block(block(hidden))
        loss = mse_loss(hidden, y) + mse_loss(self.net.blocks[0](y), x)
        self.losses.append(loss.detach())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None


@pytest.mark.parametrize(
    ("automatic", "precision", "options"),
    [
        *((automatic, precision, {}) for automatic in (True, False) for precision in (None, "bf16-mixed", "16-mixed")),
        (True, None, {"activation_checkpointing": Block}),
        (True, None, FLAT),
        (False, None, {"activation_checkpointing": Block}),
        (False, None, FLAT),
        (False, None, SHARD_GRAD_OP),
        (False, None, WHOLE),
    ],
    ids=show_parameter,
)
def test_a_block_used_twice_in_one_forward(
    ranks: RankPool, tmp_path: Path, automatic: bool, precision: Any, options: dict[str, Any]
) -> None:
    tolerance = FP32_TOLERANCE if precision is None else HALF_TOLERANCE
    plain_losses, _ = fit_module(partial(BlocksTwice, automatic), "auto", str(tmp_path), 1, 3)
    arguments = ("fsdp_native", str(tmp_path), 2, 3, options, {"precision": precision})
    for losses, _ in ranks.run(2, fit_module, partial(BlocksTwice, automatic), *arguments):
        assert losses == pytest.approx(plain_losses, rel=tolerance)


# -- gradients kept from step to step ----------------------------------------------------------------------------------


class Accumulating(Lit):
    """Steps after every third batch; gradients of the others are reduced at once, or with those of the third."""

    def __init__(self, blocked: bool, per_step: int = 1) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False
        self.blocked = blocked
        self.per_step = per_step

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        stepping = batch_idx % 3 == 2
        blocking: Any = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        for part in range(self.per_step):
            last = stepping and part == self.per_step - 1
            with blocking() if self.blocked and not last else nullcontext():
                loss = mse_loss(self.net(batch[0]), batch[1])
                self.manual_backward(loss / 3 / self.per_step)
        self.losses.append(loss.detach())
        if stepping:
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("per_step", "options", "precision"),
    [
        (1, {}, None),
        (1, FLAT, None),
        (1, SHARD_GRAD_OP, None),
        (1, WHOLE, None),
        (1, {"sync_each_batch": True}, None),
        (1, {}, "bf16-mixed"),
        (2, {}, None),
    ],
    ids=show_parameter,
)
@pytest.mark.parametrize("blocked", [False, True], ids=["reduced at once", "reduced together"])
def test_accumulating_by_hand(
    ranks: RankPool, tmp_path: Path, blocked: bool, per_step: int, options: dict[str, Any], precision: Any
) -> None:
    """Over several training steps, and over several backward passes in each."""
    want_losses, want = oracle.train_plain(6, oracle.momentum, accumulate=3, clip_norm=0.2)
    want = {f"net.{name}": tensor for name, tensor in want.items()}
    tolerance = FP32_TOLERANCE if precision is None else HALF_TOLERANCE
    arguments = ("fsdp_native", str(tmp_path), 2, 6, options, {"precision": precision})
    got = ranks.run(2, fit_module, partial(Accumulating, blocked, per_step), *arguments)
    assert_trained_alike(got, (want_losses, want), tolerance)


# -- after an exception ------------------------------------------------------------------------------------------------


class Interrupted(RuntimeError):
    """What the user's code raises."""


class RaisesGoingBack(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Interrupted


class Failing(Gan):
    """Fails in the second batch, at a point of choice; the first optimizer may have stepped by then."""

    point: str | None

    def __init__(self, mode: str, point: str, gated: bool = True) -> None:
        super().__init__(mode, gated)
        self.point = point
        self.calls = 0
        self.critic.register_forward_pre_hook(lambda *_: self.fail("in the forward"))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.late = batch_idx == 1
        super().training_step(batch, batch_idx)

    def fail(self, here: str) -> None:
        if self.point == here and self.late:
            raise Interrupted

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.point == "in the backward" and self.late:
            # behind the critic and the last block, which have had their gradients by then
            gate = self.gate[None]
            begun = gate.detach().requires_grad_()  # the gate itself may be a buffer
            loss = loss + mse_loss(self.net.blocks[2](RaisesGoingBack.apply(begun)), gate)
        super().manual_backward(loss, *args, **kwargs)
        self.fail("after the backward")


def fit_again(mode: str, point: str, tmp: str, options: dict[str, Any] | None, gated: bool = True) -> Trained:
    """Fit until it fails, then again with the same module, which doesn't fail any more."""
    strategy, world_size = ("auto", 1) if options is None else ("fsdp_native", 2)
    module = Failing(mode, point, gated)
    with pytest.raises(Interrupted):
        new_trainer(tmp, strategy, world_size, options).fit(module, loader(2, world_size))
    module.point = None
    module.losses.clear()
    run = new_trainer(tmp, strategy, world_size, options)
    run.fit(module, loader(3, world_size))
    return means(module.losses), module.state_dict() if options is None else full_state(run.strategy)


POINTS = ["in the forward", "in the backward", "after the backward"]


@pytest.mark.parametrize(
    ("mode", "point", "options", "gated"),
    [
        *((mode, point, {}, True) for mode in ("one by one", "both") for point in POINTS),
        ("zeroed last", "in the backward", {}, True),
        ("closure", "in the forward", {}, True),
        *(("one by one", point, FLAT, True) for point in POINTS),
        *(("both", point, WHOLE, True) for point in POINTS),
        ("one by one", "in the backward", IN_UNITS, False),
    ],
    ids=show_parameter,
)
def test_fit_again_after_an_exception(
    ranks: RankPool, tmp_path: Path, mode: str, point: str, options: dict[str, Any], gated: bool
) -> None:
    want = fit_again(mode, point, str(tmp_path), None, gated)
    assert_moved_alike(ranks.run(2, fit_again, mode, point, str(tmp_path), options, gated), want)
