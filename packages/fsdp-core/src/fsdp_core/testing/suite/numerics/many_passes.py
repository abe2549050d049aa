"""Steps that do more than one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import FSDPError
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.modules.parameters import own_share
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

__all__ = ["STEPS", "ManyPassesSuite"]


@dataclass(kw_only=True)
class Step:
    """What a step works with.

    Attributes:
        net: Calls the net.
        blocks: The net's blocks.
        x: Inputs.
        y: Targets.
        backward: Runs a backward pass from a loss, as the front end wants it.
        forget: The optimizer's ``zero_grad()``.
    """

    net: Callable[[Tensor], Tensor]
    blocks: nn.ModuleList
    x: Tensor
    y: Tensor
    backward: Callable[[Tensor], Any]
    forget: Callable[[], None]

    def loss(self, x: Tensor) -> Tensor:
        """The loss of inputs."""
        return mse_loss(self.net(x), self.y)

    def input_gradient(self, x: Tensor, **options: Any) -> Tensor:
        """The gradient of each row's loss with respect to the row."""
        (gradient,) = torch.autograd.grad((self.net(x) - self.y).square().sum(), x, **options)
        return gradient


def _differentiable(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(True)


def _adversarial(step: Step) -> Tensor:
    x = _differentiable(step.x)
    return step.loss((x + 0.1 * step.input_gradient(x).sign()).detach())


def _adversarial_several_times(step: Step) -> Tensor:
    shift = torch.zeros_like(step.x)
    for _ in range(3):
        shift.requires_grad_(True)
        shift = (shift.detach() + 0.05 * step.input_gradient(step.x + shift, allow_unused=True).sign()).clamp(-0.1, 0.1)
    return step.loss(step.x) + step.loss(step.x + shift)


def _adversarial_and_clean(step: Step) -> Tensor:
    x = _differentiable(step.x)
    clean = step.loss(x)
    (gradient,) = torch.autograd.grad(clean, x, retain_graph=True)
    return clean + step.loss((x + 0.1 * gradient.sign()).detach())


def _virtual_adversarial(step: Step) -> Tensor:
    with torch.no_grad():
        expected = step.net(step.x)
    shift = nn.functional.normalize(step.x.flip(1), dim=1).requires_grad_(True)
    (gradient,) = torch.autograd.grad((step.net(step.x + 0.1 * shift) - expected).square().sum(), shift)
    return step.loss(step.x) + mse_loss(step.net(step.x + nn.functional.normalize(gradient, dim=1)), expected)


def _weighed_by_gradient(step: Step) -> Tensor:
    x = _differentiable(step.x)
    losses = (step.net(x) - step.y).square().mean(1)
    (gradient,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    loss: Tensor = (losses * (1 + gradient.norm(dim=1))).mean()
    return loss


def _distance_to_1(gradient: Tensor) -> Tensor:
    penalty: Tensor = (gradient.norm(dim=1) - 1).square().mean()
    return penalty


def _penalty(step: Step) -> Tensor:
    x = _differentiable(step.x)
    output = step.net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse_loss(output, step.y) + _distance_to_1(gradient)


def _penalty_between(step: Step) -> Tensor:
    first, mixed = step.net(step.x), _differentiable(0.3 * step.x + 0.7 * step.x.flip(1))
    (gradient,) = torch.autograd.grad(step.net(mixed).sum(), mixed, create_graph=True)
    return mse_loss(first, step.y) + step.loss(step.x.flip(1)) + _distance_to_1(gradient)


def _forces(step: Step) -> Tensor:
    x = _differentiable(step.x)
    energy = step.net(x).sum(1)
    (forces,) = torch.autograd.grad(-energy.sum(), x, create_graph=True)
    return mse_loss(energy, step.y.sum(1)) + mse_loss(forces, step.y)


def _forces_alone(step: Step) -> Tensor:
    x = _differentiable(step.x)
    (forces,) = torch.autograd.grad(-step.net(x).sum(), x, create_graph=True)
    return mse_loss(forces, step.y)


def _second_derivative(step: Step) -> Tensor:
    x = _differentiable(step.x)
    value = step.net(x)[:, 0]
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second.sum(1) + value).square().mean() + step.net(0.5 * step.x).square().mean()


def _cached(step: Step) -> Tensor:
    """Gradients with respect to representations, from which a hook trains the net in parts (GradCache)."""
    parts = [slice(start, start + 2) for start in range(0, len(step.x), 2)]
    with torch.no_grad():
        outputs = [step.net(step.x[part]) for part in parts]
    outputs = [output.requires_grad_(True) for output in outputs]
    loss = mse_loss(torch.cat(outputs), step.y)
    loss.backward()
    gradients = [output.grad for output in outputs]
    result = loss.detach().requires_grad_(True)

    def train(scale: Tensor) -> None:
        with torch.enable_grad():
            for part, gradient in zip(parts, gradients, strict=True):
                assert gradient is not None
                (step.net(step.x[part]) * gradient * scale).sum().backward()

    result.register_hook(train)
    return result


def _cached_and_another(step: Step) -> Tensor:
    return _cached(step) + 0.5 * step.loss(step.x.flip(1))


def _solved(step: Step) -> Tensor:
    """A function whose backward pass runs both passes of the net, as those of fixed points do."""

    class Solved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return step.net(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x = _differentiable(ctx.saved_tensors[0])
            with torch.enable_grad():
                output = step.net(x)
            torch.autograd.backward(output, gradient)
            return x.grad

    result: Tensor = Solved.apply(_differentiable(step.x))  # type: ignore[no-untyped-call]
    return mse_loss(result, step.y)


def _frozen_for_a_call(step: Step) -> Tensor:
    def freeze(trains: bool) -> None:
        for block in step.blocks:
            block.down.requires_grad_(trains)

    freeze(False)
    with torch.no_grad():
        reference = step.net(step.x)
    freeze(True)
    return mse_loss(step.net(step.x), reference.flip(1)) + step.loss(step.x)


def _frozen_before_the_backward_pass(step: Step) -> Tensor:
    """A gradient is not added to what was frozen since the forward pass."""
    step.blocks[1].requires_grad_(True)
    loss = step.loss(step.x)
    step.blocks[1].requires_grad_(False)
    return loss


def _unfrozen_before_the_backward_pass(step: Step) -> Tensor:
    """What was frozen in the forward pass has no gradient, as a discriminator in the generator's turn."""
    step.blocks[1].down.requires_grad_(False)
    loss = step.loss(step.x)
    step.blocks[1].down.requires_grad_(True)
    return loss + 0.5 * step.input_gradient(_differentiable(step.x)).square().mean()


def _hook_through_the_same_block(step: Step) -> Tensor:
    loss: Tensor = step.blocks[2](step.x).square().mean()

    def train(scale: Tensor) -> None:
        with torch.enable_grad():
            (step.net(step.x).square().mean() * scale).backward()

    loss.register_hook(train)
    return loss


def _product_of_two(step: Step) -> Tensor:
    return (step.net(step.x) * step.net(step.x.flip(1))).mean()


def _backward_forgotten(step: Step) -> Tensor:
    x = _differentiable(step.x)
    step.backward(step.loss(x))
    assert x.grad is not None
    gradient = x.grad
    step.forget()
    return step.loss((x + 0.1 * gradient.sign()).detach())


def _backward_kept(step: Step) -> Tensor:
    """Its gradients are those of the step, if it is in the front end's hands to forget them, or none."""
    step.backward(step.loss(step.x))
    return step.loss(step.x.flip(1))


def _two_passes_through_a_loss(step: Step) -> Tensor:
    """The first pass leaves nothing at the loss by which the second one would be taken for one of the net."""
    x = _differentiable(step.x)
    another = x.mean()
    loss = step.loss(step.x)
    step.backward(another)
    torch.autograd.grad(another, x)
    return loss


#: What steps do, by a name.
STEPS: dict[str, Callable[[Step], Tensor]] = {
    "adversarial example": _adversarial,
    "adversarial example of several steps": _adversarial_several_times,
    "adversarial example beside the clean one": _adversarial_and_clean,
    "virtual adversarial example": _virtual_adversarial,
    "loss weighed by its gradient": _weighed_by_gradient,
    "gradient penalty": _penalty,
    "gradient penalty between two calls": _penalty_between,
    "forces": _forces,
    "forces alone": _forces_alone,
    "second derivative": _second_derivative,
    "cached loss": _cached,
    "cached loss beside another": _cached_and_another,
    "function that runs the net in its backward pass": _solved,
    "parameters frozen for a call": _frozen_for_a_call,
    "parameters frozen before the backward pass": _frozen_before_the_backward_pass,
    "parameters unfrozen before the backward pass": _unfrozen_before_the_backward_pass,
    "hook that runs the net, of a loss of a block alone": _hook_through_the_same_block,
    "product of two calls": _product_of_two,
    "backward pass that is forgotten": _backward_forgotten,
    "backward pass before the step's": _backward_kept,
    "two passes through a loss of inputs": _two_passes_through_a_loss,
}

BATCHES = 3


def _prepare(net: oracle.Net, what: str) -> None:
    """Take the layer norms out of a net that is differentiated three times: torch's third derivative is not exact."""
    for block in net.blocks if what == "second derivative" else ():
        block.norm = nn.Identity()


class _Automatic(Lit):
    def __init__(self, what: str) -> None:
        super().__init__("momentum")
        self.what = what
        _prepare(self.net, what)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = STEPS[self.what](self._step_of(batch, Tensor.backward, optimizer.zero_grad))
        self.losses.append(loss.detach())
        return loss

    def _step_of(
        self, batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any], forget: Callable[[], None]
    ) -> Step:
        return Step(net=self.net, blocks=self.net.blocks, x=batch[0], y=batch[1], backward=backward, forget=forget)


class _ByHand(_Automatic):
    def __init__(self, what: str, *, raw: bool) -> None:
        super().__init__(what)
        self.automatic_optimization = False
        self.raw = raw

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        backward = Tensor.backward if self.raw else self.manual_backward
        optimizer.zero_grad()
        loss = STEPS[self.what](self._step_of(batch, backward, optimizer.zero_grad))
        self.losses.append(loss.detach())
        backward(loss)
        optimizer.step()


def _fit(strategy: str, tmp: str, world_size: int, front: str, what: str) -> Trained:
    accumulated: dict[str, Any] = {"accumulate_grad_batches": BATCHES - 1} if front == "accumulated" else {}
    module = _ByHand(what, raw="raw" in front) if "by hand" in front else _Automatic(what)
    run = new_trainer(tmp, strategy, world_size, **accumulated)
    run.fit(module, loader(BATCHES, world_size))
    state = module.state_dict() if world_size == 1 else full_state(run.strategy)
    return means(module.losses), {name: tensor.detach().clone() for name, tensor in state.items()}


def _fabric(strategy: str, what: str) -> Trained:
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    _prepare(net, what)
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for batch in oracle.global_batches(BATCHES):
        x, y = own_share(fabric, batch)
        optimizer.zero_grad()
        loss = STEPS[what](
            Step(net=model, blocks=net.blocks, x=x, y=y, backward=fabric.backward, forget=optimizer.zero_grad)
        )
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
    return means(losses), {f"net.{name}": tensor for name, tensor in full_state(fabric.strategy).items()}


def _train_all(strategy: str, tmp: str, front: str) -> dict[str, Trained | str]:
    """What all kinds of steps come to: losses and weights, or the message of a refusal."""
    outcomes: dict[str, Trained | str] = {}
    for what in STEPS:
        try:
            outcomes[what] = _fabric(strategy, what) if front == "fabric" else _fit(strategy, tmp, 2, front, what)
        except FSDPError as refused:
            outcomes[what] = str(refused)
    return outcomes


def _differences(got: Trained | str, want: Trained) -> str | None:
    if isinstance(got, str):
        return f"refused: {got}"
    losses = max(abs(a - b) for a, b in zip(got[0], want[0], strict=True))
    weights = max(float((got[1][name].cpu() - tensor).abs().max()) for name, tensor in want[1].items())
    worst = max(losses, weights)
    return None if worst <= FP32_TOLERANCE else f"losses differ by {losses:.1e}, weights by {weights:.1e}"


_by_hand = requires(Capability.MANUAL_OPTIMIZATION)


class ManyPassesSuite(Clauses):
    """A step may do what a step of plain torch may."""

    @pytest.mark.parametrize(
        "front",
        [
            "fabric",
            "automatic",
            pytest.param("accumulated", marks=requires(Capability.GRADIENT_ACCUMULATION)),
            pytest.param("by hand", marks=_by_hand),
            pytest.param("by hand, with raw backward passes", marks=_by_hand),
        ],
    )
    def test_steps_of_many_passes(self, ranks: Ranks, tmp_path: Path, front: str) -> None:
        """Losses and weights must be those of one unsharded process, whatever a step differentiates and calls."""
        how = "by hand" if front == "fabric" else front
        wanted = {what: _fit("auto", str(tmp_path), 1, how, what) for what in STEPS}
        for of_rank in ranks.run(2, _train_all, self.strategy, str(tmp_path), front):
            wrong = {what: said for what, one in of_rank.items() if (said := _differences(one, wanted[what]))}
            assert wrong == {}, f"steps that are wrong: {wrong}"
