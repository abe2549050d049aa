"""Parts of loops: manual optimization, schedulers, step methods, targets, collectives, uneven evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, loader, losses_of, means, new_fabric, new_trainer, whole_batches

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
        self.manual_backward(critic_loss)  # the pass before it must have left no gradients in the critic
        self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += [loss.detach(), critic_loss.detach()]

    def configure_optimizers(self) -> Any:
        return [oracle.momentum(self.net), torch.optim.Adam(self.critic.parameters(), lr=0.01, eps=1e-3)]


def _gan(strategy: str, tmp: str, world_size: int) -> Trained:
    module = Gan()
    run = new_trainer(tmp, strategy, world_size)
    run.fit(module, loader(3, world_size), loader(1, world_size))
    return means(module.losses), full_state(run.strategy)


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
    module = ManualClip()
    new_trainer(tmp, strategy, 2, precision="16-mixed").fit(module, loader(4, 2))
    return means(module.losses)


class LooksAtGradients(Lit):
    """Uses torch's own functions on gradients, in its training step.

    Args:
        what: ``"clipped"``; ``"after a forward pass"``, which may unshard parameters; ``"accumulated"`` over two
            backward passes; ``"scaled"`` one by one; or ``"zeroed"`` between two backward passes.
    """

    def __init__(self, what: str) -> None:
        super().__init__("momentum")
        self.automatic_optimization = False
        self.what = what
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        if self.what == "zeroed":
            self.zero_grad()
        if self.what in ("accumulated", "zeroed"):
            self.manual_backward(mse_loss(self(batch[0]), 2 * batch[1]))
        if self.what == "after a forward pass":
            self(batch[0])
        if self.what == "scaled":
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5
        norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()


LOOKS = ["clipped", "after a forward pass", "accumulated", "scaled", "zeroed"]


def _looks(strategy: str, tmp: str, world_size: int) -> dict[str, tuple[list[float], list[float]] | str]:
    """Losses and norms, or the error message."""
    outcomes: dict[str, tuple[list[float], list[float]] | str] = {}
    for what in LOOKS:
        module = LooksAtGradients(what)
        try:
            new_trainer(tmp, strategy, world_size).fit(module, loader(2, world_size))
        except UnsupportedCapabilityError as refused:
            outcomes[what] = str(refused)
        else:
            outcomes[what] = means(module.losses), module.seen
    return outcomes


class HooksLook(Lit):
    """Computes the norm of all gradients in hooks before a step, where users log it.

    Args:
        automatic: Whether optimization is automatic.
        alone: Whether the norm of each gradient is computed by itself.
    """

    def __init__(self, automatic: bool, alone: bool) -> None:
        super().__init__("momentum")
        self.automatic_optimization = automatic
        self.alone = alone
        self.seen: list[float] = []

    def look(self) -> None:
        if self.alone:
            self.seen.append(sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))
            return
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_after_backward(self) -> None:
        if self.automatic_optimization:  # otherwise gradients may not be reduced yet
            self.look()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


def _hooks_look(
    strategy: str, tmp: str, world_size: int, automatic: bool, alone: bool
) -> tuple[list[float], list[float]] | str:
    """Losses and norms, or the error message."""
    module = HooksLook(automatic, alone)
    try:
        new_trainer(tmp, strategy, world_size).fit(module, loader(2, world_size))
    except (ShardingError, UnsupportedCapabilityError) as refused:
        return str(refused)
    return means(module.losses), module.seen


def norm_of(gradients: list[Tensor]) -> float:
    """What torch says of gradients, as one writes it for plain tensors and for DTensors."""
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def clipped(held: list[nn.Parameter]) -> float:
    """What torch's clipping says the norm was."""
    norm: Any = torch.nn.utils.clip_grad_norm_(held, 0.1)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def clipped_by_value(held: list[nn.Parameter]) -> float:
    """Nothing that is computed of several elements, which is right on pieces too."""
    torch.nn.utils.clip_grad_value_(held, 0.05)
    return 0.0


#: What scripts under Fabric do with gradients between ``fabric.backward()`` and the step, or after it.
FABRIC_LOOKS: dict[str, Callable[[list[nn.Parameter]], float]] = {
    "clipped": clipped,
    "clipped by value": clipped_by_value,
    "all at once": lambda held: norm_of([p.grad for p in held if p.grad is not None]),
    "one by one": lambda held: sum(float(p.grad.norm()) for p in held if p.grad is not None),
}


def _looks_under_fabric(strategy: str, what: str, is_stepped: bool) -> tuple[list[float], list[float], Any] | str:
    """Losses, what was seen of gradients before or after steps, and the parameters at the end; or the error message."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    held = list(model.parameters())
    losses, seen = [], []
    try:
        for x, y in whole_batches(fabric, 3):
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            losses.append(loss.detach())
            if not is_stepped:
                seen.append(FABRIC_LOOKS[what](held))
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            if is_stepped:
                seen.append(FABRIC_LOOKS[what](held))
            optimizer.zero_grad()
    except (ShardingError, UnsupportedCapabilityError) as refused:
        return str(refused)
    return means(losses), seen, full_state(fabric.strategy)


def _plain_looks(what: str, is_stepped: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process, without Lightning."""
    net = oracle.new_net()
    optimizer, held = oracle.momentum(net), list(net.parameters())
    losses, seen = [], []
    for x, y in oracle.global_batches(3):
        loss = mse_loss(net(x), y)
        loss.backward()
        losses.append(loss.item())
        if not is_stepped:
            seen.append(FABRIC_LOOKS[what](held))
        nn.utils.clip_grad_norm_(held, 0.05)
        optimizer.step()
        if is_stepped:
            seen.append(FABRIC_LOOKS[what](held))
        optimizer.zero_grad()
    return losses, seen, net.state_dict()


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
    module = UsesRootTwice()
    new_trainer(tmp, strategy, 2, options).fit(module, loader(3, 2))
    return means(module.losses)


def assert_root_stays_gathered(ranks: Ranks, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    """Assert that a step may call the root, then use its parameter. Backends may pass their own options."""
    plain = UsesRootTwice()
    new_trainer(tmp_path, "auto").fit(plain, loader(3, 1))
    for losses in ranks.run(2, root_used_twice, strategy, str(tmp_path), options):
        assert losses == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)


class Wrapped(nn.Module):
    """Has a step method, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = oracle.new_net()

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return mse_loss(self.net(x), y)


def _fabric_step_method(strategy: str) -> list[float]:
    fabric = new_fabric(strategy)
    wrapped = Wrapped()
    model, optimizer = fabric.setup(wrapped, oracle.sgd(wrapped))
    losses = []
    for x, y in whole_batches(fabric, 3):
        loss = model.training_step(x, y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _collectives(strategy: str) -> dict[str, Any]:
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


class LoopsSuite(Clauses):
    """Training loops that do more than a forward pass, a backward pass and a step."""

    @requires(Capability.MANUAL_OPTIMIZATION, Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_manual_optimization(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """Manual optimization with two optimizers must give the losses and weights of one unsharded process."""
        plain = Gan()
        new_trainer(tmp_path, "auto").fit(plain, loader(3, 1))
        for losses, state in ranks.run(world_size, _gan, self.strategy, str(tmp_path), world_size):
            assert losses == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)
            for name, tensor in plain.state_dict().items():
                torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=name)

    @requires(Capability.MANUAL_OPTIMIZATION)
    def test_torchs_functions_on_gradients_inside_a_step(self, ranks: Ranks, tmp_path: Path) -> None:
        """Torch's functions on gradients inside a step must work, or be refused on every rank, never ignored."""
        got = ranks.run(2, _looks, self.strategy, str(tmp_path), 2)
        for what in LOOKS:
            plain = LooksAtGradients(what)
            new_trainer(tmp_path, "auto").fit(plain, loader(2, 1))
            for of_rank in got:
                outcome = of_rank[what]
                if isinstance(outcome, str):
                    assert_says(outcome, "piece", "Write self.clip_gradients(optimizer", "optimizer.zero_grad()")
                else:
                    assert outcome[0] == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE), what
                    assert outcome[1] == pytest.approx(plain.seen, abs=FP32_TOLERANCE), what

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
        plain = HooksLook(automatic, alone)
        new_trainer(tmp_path, "auto").fit(plain, loader(2, 1))
        norms = 2 * (1 + automatic)
        assert len(plain.seen) == norms, f"the hooks on one device computed {len(plain.seen)} norms instead of {norms}"
        for outcome in ranks.run(2, _hooks_look, self.strategy, str(tmp_path), 2, automatic, alone):
            if isinstance(outcome, str) and "read from a DTensor" in outcome:
                assert_says(outcome, "this rank computed from its shards alone", "Write float(value.full_tensor())")
            elif isinstance(outcome, str):
                assert_says(outcome, "piece", "Write self.clip_gradients(optimizer")
            else:
                assert outcome[0] == pytest.approx(losses_of(plain), abs=FP32_TOLERANCE)
                assert outcome[1] == pytest.approx(plain.seen, abs=FP32_TOLERANCE)

    @requires(Capability.CLIP_BY_NORM)
    @pytest.mark.parametrize("is_stepped", [False, True], ids=["before the step", "after it"])
    @pytest.mark.parametrize("what", FABRIC_LOOKS)
    def test_torchs_functions_on_gradients_under_fabric(self, ranks: Ranks, what: str, is_stepped: bool) -> None:
        """What torch computes of gradients between two steps must be of whole ones, or be refused on every rank."""
        losses, seen, state = _plain_looks(what, is_stepped)
        for outcome in ranks.run(2, _looks_under_fabric, self.strategy, what, is_stepped):
            if isinstance(outcome, str) and "read from a DTensor" in outcome:
                assert_says(outcome, "this rank computed from its shards alone", "Write float(value.full_tensor())")
            elif isinstance(outcome, str):
                assert what != "clipped by value", outcome
                assert_says(outcome, "piece", "fabric.clip_gradients(model, optimizer, max_norm=...)")
            else:
                assert outcome[1] == pytest.approx(seen, abs=FP32_TOLERANCE)
                assert_same([(outcome[0], outcome[2])], (losses, state))

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
        assert ranks.run(2, _collectives, self.strategy) == [want, want]
