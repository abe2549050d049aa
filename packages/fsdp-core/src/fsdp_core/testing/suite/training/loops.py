"""Parts of loops: manual optimization, schedulers, step methods, targets, collectives, uneven evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, result_or_refusal
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, fit_module, fit_plainly, new_fabric

__all__ = ["Gan", "LoopsSuite", "UsesRootTwice", "assert_root_stays_gathered", "root_used_twice"]


class Gan(Lit):
    """Two optimizers over two halves, both stepped in one training step, with forward passes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with oracle.seeded(3):
            self.critic = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        first: Any
        second: Any
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        loss = mse_loss(self.net(x), y) + self.critic(self.net(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        critic_loss = (self.critic(self.net(x).detach()) ** 2).mean()
        self.manual_backward(critic_loss)  # the first pass must have left no gradients in the critic
        self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += [loss.detach(), critic_loss.detach()]

    def configure_optimizers(self) -> Any:
        return [oracle.momentum(self.net), torch.optim.Adam(self.critic.parameters(), lr=0.01, eps=1e-3)]


def _train_gan(strategy: str, tmp: str, world_size: int) -> Trained:
    return fit_module(strategy, tmp, Gan(), 3, world_size, validation_steps=1)


class ManualClip(Lit):
    """Clips gradients in its training step, under manual optimization."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def _manual_clip(strategy: str, tmp: str) -> list[float]:
    return fit_module(strategy, tmp, ManualClip(), 4, precision="16-mixed")[0]


def plain_number(value: Any) -> float:
    """A norm that torch has computed, as a number. Of a DTensor, each rank may hold a part of the value."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


class GradientReader(Lit):
    """Uses torch's own functions on gradients, in its training step.

    Args:
        use: ``"clipped"``; ``"after a forward pass"``, which may unshard parameters; ``"accumulated"`` over two
            backward passes; ``"scaled"`` one by one; or ``"zeroed"`` between two backward passes.
    """

    def __init__(self, use: str) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False
        self.use = use
        self.norms: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        if self.use == "zeroed":
            self.zero_grad()
        if self.use in ("accumulated", "zeroed"):
            self.manual_backward(mse_loss(self(batch[0]), 2 * batch[1]))
        if self.use == "after a forward pass":
            self(batch[0])
        if self.use == "scaled":
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5
        self.norms.append(plain_number(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()


#: The uses of gradients that :class:`GradientReader` knows.
USES = ["clipped", "after a forward pass", "accumulated", "scaled", "zeroed"]


class HookReader(Lit):
    """Computes the norm of all gradients in hooks before a step, where users log it.

    Args:
        automatic: Whether optimization is automatic.
        alone: Whether the norm of each gradient is computed by itself.
    """

    def __init__(self, automatic: bool, alone: bool) -> None:
        super().__init__("momentum")
        self.automatic_optimization = automatic
        self.read_norm = norms_one_by_one if alone else norm_of_all
        self.norms: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.step_by_hand(loss)
        return None

    def on_after_backward(self) -> None:
        if self.automatic_optimization:  # otherwise gradients may not be reduced yet
            self.norms.append(self.read_norm(list(self.parameters())))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.read_norm(list(self.parameters())))


#: Losses, and the norms that were computed.
Norms = tuple[list[float], list[float]]


def _fit_with_norms(strategy: str, tmp: str, module: GradientReader | HookReader) -> Norms | str:
    """Losses and norms, or the error message."""

    def fit() -> Norms:
        losses, _ = fit_module(strategy, tmp, module, 2)
        return losses, module.norms

    return result_or_refusal((ShardingError, UnsupportedCapabilityError), fit)


def _fit_with_each_use(strategy: str, tmp: str) -> dict[str, Norms | str]:
    return {use: _fit_with_norms(strategy, tmp, GradientReader(use)) for use in USES}


def _fit_with_hooks(strategy: str, tmp: str, automatic: bool, alone: bool) -> Norms | str:
    return _fit_with_norms(strategy, tmp, HookReader(automatic, alone))


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def norm_of_all(parameters: list[nn.Parameter]) -> float:
    """The norm of all gradients by torch's function, as users write it for plain tensors and DTensors."""
    return plain_number(nn.utils.get_total_norm(_gradients_of(parameters)))


def norms_one_by_one(parameters: list[nn.Parameter]) -> float:
    """The sum of each gradient's norm."""
    return sum(float(gradient.norm()) for gradient in _gradients_of(parameters))


def clip_by_norm(parameters: list[nn.Parameter]) -> float:
    """Clip gradients by torch's function, and return the norm that it has computed."""
    return plain_number(nn.utils.clip_grad_norm_(parameters, 0.1))


def clip_by_value(parameters: list[nn.Parameter]) -> float:
    """Clip gradients by value, which is right on pieces too; return a dummy."""
    nn.utils.clip_grad_value_(parameters, 0.05)
    return 0.0


#: The uses of gradients in scripts under Fabric, before or after the optimizer's step. Each returns a norm.
FABRIC_USES: dict[str, Callable[[list[nn.Parameter]], float]] = {
    "clipped": clip_by_norm,
    "clipped by value": clip_by_value,
    "all at once": norm_of_all,
    "one by one": norms_one_by_one,
}


def _train_with_use(strategy: str | None, use: str, is_stepped: bool) -> tuple[list[float], Trained] | str:
    """The norms computed before or after steps, with losses and weights; or the error message."""
    loop = Loop(strategy)
    parameters = list(loop.model.parameters())

    def train() -> tuple[list[float], Trained]:
        losses = []
        norms = []
        for x, y in loop.whole_batches(3):
            loss = loop.loss(x, y)
            loop.backward(loss)
            losses.append(loss.detach())
            if not is_stepped:
                norms.append(FABRIC_USES[use](parameters))
            if loop.fabric is None:
                nn.utils.clip_grad_norm_(parameters, 0.05)
            else:
                loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=0.05)
            loop.optimizer.step()
            if is_stepped:
                norms.append(FABRIC_USES[use](parameters))
            loop.optimizer.zero_grad()
        return norms, (loop.means(losses), loop.state())

    return result_or_refusal((ShardingError, UnsupportedCapabilityError), train)


class UsesRootTwice(Lit):
    """Calls itself, then uses one of its own parameters."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]) + self.bias, batch[1])
        self.losses.append(loss.detach())
        return loss


def root_used_twice(strategy: str, tmp: str, options: dict[str, Any]) -> list[float]:
    """The losses of :class:`UsesRootTwice` on two ranks."""
    return fit_module(strategy, tmp, UsesRootTwice(), 3, options=options)[0]


def assert_root_stays_gathered(ranks: Ranks, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    """Assert that a step may call the root, then use its parameter; for tests of a backend's own options, too."""
    want, _ = fit_plainly(tmp_path, UsesRootTwice(), 3)
    for losses in ranks.run(2, root_used_twice, strategy, str(tmp_path), options):
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


class WithStepMethod(nn.Module):
    """Has a step method, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = oracle.new_net()

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return mse_loss(self.net(x), y)


def _fabric_step_method(strategy: str) -> list[float]:
    loop = Loop(strategy, oracle.sgd, WithStepMethod())
    losses = []
    for x, y in loop.whole_batches(3):
        loss = loop.model.training_step(x, y)
        losses.append(loss.item())
        loop.backward(loss)
        loop.step()
    return losses


def _call_collectives(strategy: str) -> dict[str, Any]:
    fabric = new_fabric(strategy)
    rank = fabric.global_rank
    source = fabric.to_device(torch.full((2,), float(rank))).requires_grad_()
    gathered: Any = fabric.all_gather(source, sync_grads=True)
    gathered.sum().backward()
    assert source.grad is not None
    mean: Any = fabric.all_reduce(torch.tensor(float(rank)))
    total: Any = fabric.all_reduce(torch.tensor(rank + 1), reduce_op="sum")
    ranks: Any = fabric.all_gather(torch.tensor([rank]))
    numbers: Any = fabric.all_gather({"of a rank": rank})
    return {
        "mean": mean.item(),
        "sum": total.item(),
        "text": fabric.strategy.all_reduce("unchanged"),
        "gathered": ranks.tolist(),
        "numbers": numbers["of a rank"].tolist(),
        "by the strategy": cast(Any, fabric.strategy).all_gather(rank).tolist(),
        "grad": source.grad.tolist(),
        "object": fabric.broadcast({"from": rank, "path": Path("x")}, src=fabric.world_size - 1),
    }


def _assert_refused_on_pieces(message: str, advice: str) -> None:
    """Assert that a number computed from a rank's pieces of gradients was refused, in words that say what to do."""
    if "read from a DTensor" in message:
        assert_says(message, "this rank computed from its shards alone", "Write float(value.full_tensor())")
    else:
        assert_says(message, "piece", advice)


class LoopsSuite(Clauses):
    """Training loops that do more than a forward pass, a backward pass and a step."""

    @requires(Capability.MANUAL_OPTIMIZATION, Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_manual_optimization(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """Manual optimization with two optimizers must give the losses and weights of one unsharded process."""
        want = fit_plainly(tmp_path, Gan(), 3)
        assert_same(ranks.run(world_size, _train_gan, self.strategy, str(tmp_path), world_size), want)

    @requires(Capability.MANUAL_OPTIMIZATION)
    def test_torchs_functions_on_gradients_inside_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """Torch's functions on gradients inside a step must work, or be refused on every rank, never ignored."""
        outcomes = ranks.run(2, _fit_with_each_use, self.strategy, str(tmp_path))
        for use in USES:
            module = GradientReader(use)
            losses, _ = fit_plainly(tmp_path, module, 2)
            for outcome in [outcome_by_use[use] for outcome_by_use in outcomes]:
                if isinstance(outcome, str):
                    assert_says(outcome, "piece", "Write self.clip_gradients(optimizer", "optimizer.zero_grad()")
                else:
                    assert outcome[0] == pytest.approx(losses, abs=FP32_TOLERANCE), use
                    assert outcome[1] == pytest.approx(module.norms, abs=FP32_TOLERANCE), use

    @pytest.mark.parametrize(
        "automatic",
        [True, pytest.param(False, marks=requires(Capability.MANUAL_OPTIMIZATION))],
        ids=["by itself", "by hand"],
    )
    @pytest.mark.parametrize("alone", [False, True], ids=["all", "each"])
    def test_torchs_functions_on_gradients_in_hooks(
        self, ranks: Ranks, tmp_path: Path, automatic: bool, alone: bool
    ) -> None:
        """A norm computed from gradients in a hook must be that of whole gradients, or be refused."""
        module = HookReader(automatic, alone)
        losses, _ = fit_plainly(tmp_path, module, 2)
        norms = 4 if automatic else 2  # two steps, each with two hooks or with one
        message = f"the hooks on one device computed {len(module.norms)} norms instead of {norms}"
        assert len(module.norms) == norms, message
        for outcome in ranks.run(2, _fit_with_hooks, self.strategy, str(tmp_path), automatic, alone):
            if isinstance(outcome, str):
                _assert_refused_on_pieces(outcome, "Write self.clip_gradients(optimizer")
            else:
                assert outcome[0] == pytest.approx(losses, abs=FP32_TOLERANCE)
                assert outcome[1] == pytest.approx(module.norms, abs=FP32_TOLERANCE)

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("is_stepped", [False, True], ids=["before the step", "after it"])
    @pytest.mark.parametrize("use", FABRIC_USES)
    def test_torchs_functions_on_gradients_under_fabric(self, ranks: Ranks, use: str, is_stepped: bool) -> None:
        """Norms that torch computes between two steps must be of whole gradients, or be refused on every rank."""
        want = _train_with_use(None, use, is_stepped)
        assert not isinstance(want, str)
        for outcome in ranks.run(2, _train_with_use, self.strategy, use, is_stepped):
            if isinstance(outcome, str):
                assert use != "clipped by value" or "read from a DTensor" in outcome, outcome
                _assert_refused_on_pieces(outcome, "fabric.clip_gradients(model, optimizer, max_norm=...)")
            else:
                assert outcome[0] == pytest.approx(want[0], abs=FP32_TOLERANCE)
                assert_same([outcome[1]], want[1])

    @requires(
        Capability.MANUAL_OPTIMIZATION, Capability.CLIP_BY_NORM, Capability.MIXED_PRECISION, Capability.GRADIENT_SCALING
    )
    def test_clipping_by_hand_sees_unscaled_gradients(self, ranks: Ranks, tmp_path: Path) -> None:
        """``self.clip_gradients()`` in a training step must clip unscaled gradients under ``16-mixed``."""
        want, _ = oracle.train_plain(4, oracle.sgd, clip_norm=0.2)
        for losses in ranks.run(2, _manual_clip, self.strategy, str(tmp_path)):
            assert losses == pytest.approx(want, rel=HALF_TOLERANCE)

    def test_root_stays_gathered_through_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """A training step must be able to use a parameter of the root after it has called the root."""
        assert_root_stays_gathered(ranks, tmp_path, self.strategy, {})

    def test_fabric_step_method_runs_through_the_root(self, ranks: Ranks) -> None:
        """Under Fabric, a module without ``forward`` must be trainable through a method such as ``training_step``."""
        want, _ = oracle.train_plain(3, oracle.sgd)
        for losses in ranks.run(2, _fabric_step_method, self.strategy):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    def test_collectives(self, ranks: Ranks) -> None:
        """Fabric's ``all_gather``, with gradients, ``all_reduce`` and ``broadcast`` must return the right values."""
        count = 1 if ranks.kind == "one controller" else 2
        want = {
            "mean": (count - 1) / 2,
            "sum": count * (count + 1) / 2,
            "text": "unchanged",
            "gathered": [[rank] for rank in range(count)],
            "numbers": list(range(count)),
            "by the strategy": list(range(count)),
            "grad": [float(count)] * 2,
            "object": {"from": count - 1, "path": Path("x")},
        }
        assert ranks.run(2, _call_collectives, self.strategy) == [want, want]
