"""Steps that do more than one forward and one backward pass."""

from __future__ import annotations

import contextlib
import os
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from fsdp_core.errors import FSDPError, ShardingError
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, result_or_refusal
from fsdp_core.testing.state import full_state, trained_by
from fsdp_core.testing.suite.base_class import Clauses, needs_of, requires
from fsdp_core.testing.suite.numerics.pairs import SEED
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer, own_share, scaled_precision

__all__ = [
    "SETTINGS",
    "STEPS",
    "WRITTEN_BEFORE_BACKWARD",
    "ManyPassesSuite",
    "NeededPart",
    "Setting",
    "assert_needed",
    "assert_recovers_without_fabric",
    "assert_right_on_one_rank",
    "assert_writes_are_seen",
]


@dataclass(kw_only=True)
class Step:
    """The net, batch and optimizer that a step works with.

    Attributes:
        net: Calls the net.
        module: The user's module. Under Fabric, ``net`` is the wrapper that ``fabric.setup`` has returned for it.
        x: Inputs.
        y: Targets.
        backward: The front end's function for a backward pass, such as ``fabric.backward``.
        optimizer: The optimizer.
    """

    net: Callable[[Tensor], Tensor]
    module: oracle.Net
    x: Tensor
    y: Tensor
    backward: Callable[[Tensor], Any]
    optimizer: Any

    @property
    def blocks(self) -> Any:
        """The net's blocks."""
        return self.module.blocks

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
    first = step.net(step.x)
    mixed = _differentiable(0.3 * step.x + 0.7 * step.x.flip(1))
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


def _solved_beside_a_later_call(step: Step) -> Tensor:
    """Autograd visits the later call first. So the backward pass inside ``_solved`` calls units already visited."""
    return _solved(step) + step.loss(0.5 * step.x)


def _recomputed_inside(step: Step) -> Tensor:
    """Two calls of units that a backward pass of their own recomputes, as a reentrant checkpoint does.

    It is written out here since torch's checkpoint has no device module for XLA.
    """

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            return step.blocks[1](step.blocks[0](x))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x = _differentiable(ctx.saved_tensors[0])
            with torch.enable_grad():
                output = step.blocks[1](step.blocks[0](x))
            torch.autograd.backward(output, gradient)
            return x.grad

    def computed(x: Tensor) -> Tensor:
        result: Tensor = Recomputed.apply(_differentiable(x))  # type: ignore[no-untyped-call]
        return mse_loss(result, step.y)

    return computed(step.x) + computed(0.5 * step.x) + step.loss(step.x.flip(1))


def _recomputed(step: Step) -> Tensor:
    """Two calls of the whole net that are recomputed in their backward passes, beside a call that is not."""

    def loss(x: Tensor) -> Tensor:
        if x.device.type == "xla":  # for which torch's checkpoint has no device module
            return step.loss(x)
        output: Tensor = checkpoint(step.net, x, use_reentrant=False)
        return mse_loss(output, step.y)

    return loss(step.x) + loss(0.5 * step.x) + step.loss(step.x.flip(1))


@contextlib.contextmanager
def _freeze(*targets: nn.Module | nn.Parameter) -> Iterator[None]:
    """Freeze modules or parameters within the context."""
    for target in targets:
        target.requires_grad_(False)
    yield
    for target in targets:
        target.requires_grad_(True)


def _frozen_for_a_call(step: Step) -> Tensor:
    with _freeze(*(block.down for block in step.blocks)), torch.no_grad():
        reference = step.net(step.x)
    return mse_loss(step.net(step.x), reference.flip(1)) + step.loss(step.x)


def _frozen_for_an_attack(step: Step) -> Tensor:
    """All parameters are frozen during the attack; the user's own module is called, not Fabric's wrapper."""
    with _freeze(*(parameter for parameter in step.module.parameters() if parameter.requires_grad)):
        x = _differentiable(step.x)
        (gradient,) = torch.autograd.grad((step.module(x) - step.y).square().sum(), x)
    return mse_loss(step.module(step.x + 0.1 * gradient.sign()), step.y)


def _frozen_in_one_of_two_calls(step: Step) -> Tensor:
    """The block's gradient comes from the call alone in which it is not frozen."""
    with _freeze(*step.blocks[0].parameters()):
        first = step.loss(step.x)
    return first + step.loss(step.x.flip(1))


def _parts_frozen_in_one_of_two_calls(step: Step) -> Tensor:
    """As ``_frozen_in_one_of_two_calls``, with parts of blocks."""
    with _freeze(step.blocks[1].down, step.blocks[0].norm):
        first = step.loss(step.x)
    return first + step.loss(step.x.flip(1))


def _frozen_before_a_forgotten_backward_pass(step: Step) -> Tensor:
    """The frozen parameters, among them the tied pair at the root, have a gradient that ``zero_grad()`` clears."""
    step.backward(step.loss(step.x))
    loss = step.loss(step.x.flip(1))
    with _freeze(step.module.inp, step.blocks[1]):
        step.backward(loss)
    step.optimizer.zero_grad()
    return step.loss(0.5 * step.x)


def _frozen_before_the_backward_pass(step: Step) -> Tensor:
    """A parameter that was frozen after the forward pass gets no gradient."""
    step.blocks[1].requires_grad_(True)
    loss = step.loss(step.x)
    step.blocks[1].requires_grad_(False)
    return loss


def _unfrozen_before_the_backward_pass(step: Step) -> Tensor:
    """A parameter that was frozen in the forward pass gets no gradient, as a discriminator in the generator's turn."""
    with _freeze(step.blocks[1].down):
        loss = step.loss(step.x)
    return loss + 0.5 * step.input_gradient(_differentiable(step.x)).square().mean()


def _hook_through_the_same_block(step: Step) -> Tensor:
    loss: Tensor = step.blocks[2](step.x).square().mean()

    def train(scale: Tensor) -> None:
        with torch.enable_grad():
            (step.net(step.x).square().mean() * scale).backward()

    loss.register_hook(train)
    return loss


def _frozen_after_a_backward_pass(step: Step) -> Tensor:
    """The block keeps the gradients of the first pass, and the optimizer steps with them."""
    step.backward(step.loss(step.x))
    step.blocks[2].requires_grad_(False)
    return step.loss(step.x.flip(1))


def _product_of_two(step: Step) -> Tensor:
    return (step.net(step.x) * step.net(step.x.flip(1))).mean()


def _backward_forgotten(step: Step) -> Tensor:
    x = _differentiable(step.x)
    step.backward(step.loss(x))
    assert x.grad is not None
    gradient = x.grad
    step.optimizer.zero_grad()
    return step.loss((x + 0.1 * gradient.sign()).detach())


def _backward_kept(step: Step) -> Tensor:
    """The first pass's gradients are added to the second's, unless the front end clears them before the second."""
    step.backward(step.loss(step.x))
    return step.loss(step.x.flip(1))


def _caught_in_a_backward_pass(step: Step) -> Tensor:
    """An exception ends a backward pass in the middle. The step clears the gradients and runs another pass."""
    output = step.net(step.x)
    inner = step.blocks[0](step.x)
    inner.register_hook(_fail)
    with contextlib.suppress(_CaughtError):
        step.backward(mse_loss(output + step.blocks[1](inner), step.y))
    del output, inner
    step.optimizer.zero_grad()
    return step.loss(step.x)


def _caught_in_a_call(step: Step) -> Tensor:
    """An exception ends a call in the middle, while a graph that holds parameters is still to be differentiated."""
    x = _differentiable(step.x)
    output = step.net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    if x.device.type != "xla":  # torch_xla's wrapper does not end a call that raises
        hook = step.blocks[2].register_forward_pre_hook(_fail)
        with contextlib.suppress(_CaughtError):
            step.net(0.5 * x)
        hook.remove()
    return mse_loss(output, step.y) + gradient.square().mean()


def _fail(*_: Any) -> None:
    raise _CaughtError


class _CaughtError(Exception):
    """The exception that steps raise and catch."""


def _two_passes_through_a_loss(step: Step) -> Tensor:
    """Two passes through a loss of inputs alone: neither may be taken for a backward pass of the net."""
    x = _differentiable(step.x)
    another = x.mean()
    loss = step.loss(step.x)
    step.backward(another)
    torch.autograd.grad(another, x)
    return loss


def _optimizers_parameters_written(step: Step) -> Tensor:
    """Decay by hand, and SAM before its second pass, write to parameters: the next call computes with new values."""
    with torch.no_grad():
        first = step.net(step.x)
        for parameter in trained_by(step.optimizer):
            parameter.mul_(0.9)
        second = step.net(step.x)
        for parameter in trained_by(step.optimizer):
            parameter.mul_(1.1)
    return mse_loss(step.net(step.x), first) + mse_loss(step.net(step.x), second.flip(1)) + step.loss(step.x)


def _written_while_a_graph_waits(step: Step) -> Tensor:
    """A recorded graph keeps units gathered. Those that are written to, and not the root, are gathered anew."""
    gradient = step.input_gradient(_differentiable(step.x), create_graph=True).detach()
    with torch.no_grad():
        for parameter in trained_by(step.optimizer)[1:4]:  # of blocks
            parameter.mul_(0.9)
    return step.loss(step.x + 0.1 * gradient)


def _converted_to_what_it_is(step: Step) -> Tensor:
    """Libraries convert modules to make sure of their device. Under Fabric, nothing is gathered before a first call."""
    step.module.to(step.x.device)
    loss = step.loss(step.x)
    step.blocks[1].to(step.x.device)
    step.module.to(step.x.device)
    return loss + step.loss(step.x.flip(1))


#: The kinds of steps, by name: each is a function that returns the loss.
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
    "function that runs the net in its backward pass, beside a later call": _solved_beside_a_later_call,
    "units computed again in passes of their own, and called again": _recomputed_inside,
    "net computed again, twice": _recomputed,
    "parameters frozen for a call": _frozen_for_a_call,
    "parameters frozen while an adversarial example is made": _frozen_for_an_attack,
    "parameters frozen in one of two calls": _frozen_in_one_of_two_calls,
    "parts of blocks frozen in one of two calls": _parts_frozen_in_one_of_two_calls,
    "parameters frozen before the backward pass": _frozen_before_the_backward_pass,
    "parameters frozen before a backward pass that is forgotten": _frozen_before_a_forgotten_backward_pass,
    "parameters unfrozen before the backward pass": _unfrozen_before_the_backward_pass,
    "parameters frozen after a backward pass": _frozen_after_a_backward_pass,
    "hook that runs the net, of a loss of a block alone": _hook_through_the_same_block,
    "product of two calls": _product_of_two,
    "backward pass that is forgotten": _backward_forgotten,
    "backward pass before the step's": _backward_kept,
    "two passes through a loss of inputs": _two_passes_through_a_loss,
    "optimizer's parameters written between two calls": _optimizers_parameters_written,
    "blocks written while a graph waits": _written_while_a_graph_waits,
    "backward pass that an exception ends, and another": _caught_in_a_backward_pass,
    "call that an exception ends, while a graph waits": _caught_in_a_call,
    "module converted to the device that it is on": _converted_to_what_it_is,
}

#: The kinds of steps that torch's checkpoint refuses, because the recomputation saves other tensors than the forward
#: pass.
_RECOMPUTED_OTHERWISE = {
    "parameters frozen in one of two calls",
    "parts of blocks frozen in one of two calls",
    "parameters frozen before the backward pass",
    "parameters frozen before a backward pass that is forgotten",
    "parameters unfrozen before the backward pass",
}

BATCHES = 3

#: The limits that gradients are clipped to, by what is clipped.
_CLIP: Mapping[str, float] = {"norm": 0.3, "value": 0.02}

#: In half precision, how far the weights' change in training may be from that in fp32, relative to its norm. Measured:
#: below 0.03. If a gradient is lost or counted twice, it is a third or more.
_MAX_RELATIVE_ERROR = 0.05

#: An initial loss scale with which no gradient of the net overflows, so that no step is skipped.
_SCALE = 2.0**8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How steps are trained, whatever their kind.

    Attributes:
        options: The strategy's options.
        ranks: The number of ranks.
        accumulate: The number of micro-batches of an optimizer's step.
        clip: Whether gradients' norm or values are clipped, if any.
        precision: Lightning's name of the precision; fp32 if ``None``.
        needs: The capabilities that the setting needs, besides those of the options.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    accumulate: int = 1
    clip: Literal["norm", "value"] | None = None
    precision: Literal["bf16-mixed", "16-mixed"] | None = None
    needs: tuple[Capability, ...] = ()

    def kinds(self) -> list[str]:
        """The names of the kinds of steps that plain torch can train in this setting."""
        left_out: set[str] = set()
        if self.options.get("activation_checkpointing_policy") is not None:
            left_out |= _RECOMPUTED_OTHERWISE
        return [kind for kind in STEPS if kind not in left_out]

    def unsharded(self) -> Setting:
        """The same setting in one unsharded process in fp32."""
        return Setting(ranks=1, accumulate=self.accumulate, clip=self.clip)

    def precision_of(self, plugin: Any) -> dict[str, Any]:
        """The front end's arguments for the precision.

        Args:
            plugin: The front end's plugin for mixed precision.
        """
        if self.precision == "16-mixed":
            return {"plugins": scaled_precision(plugin, _SCALE)}
        return {"precision": self.precision}


_ACCUMULATES = Capability.GRADIENT_ACCUMULATION
_MIXED = Capability.MIXED_PRECISION

#: Settings that differ from the default, by name. "its own" stands for the strategy's ``own_step_options``.
SETTINGS: Mapping[str, Setting] = {
    "accumulated and clipped by norm": Setting(
        accumulate=2, clip="norm", needs=(_ACCUMULATES, Capability.CLIP_BY_NORM)
    ),
    "clipped by value": Setting(clip="value", needs=(Capability.CLIP_BY_VALUE,)),
    "bf16-mixed": Setting(precision="bf16-mixed", needs=(_MIXED,)),
    "16-mixed": Setting(precision="16-mixed", needs=(_MIXED, Capability.GRADIENT_SCALING)),
    "reshard_after_forward=False": Setting(options={"reshard_after_forward": False}),
    "cpu_offload": Setting(options={"cpu_offload": True}),
    "activation checkpointing": Setting(options={"activation_checkpointing_policy": {oracle.Block}}),
    "activation checkpointing, bf16-mixed, accumulated": Setting(
        options={"activation_checkpointing_policy": {oracle.Block}},
        precision="bf16-mixed",
        accumulate=2,
        needs=(_ACCUMULATES, _MIXED),
    ),
    "sync_each_batch": Setting(options={"sync_each_batch": True}, accumulate=2, needs=(_ACCUMULATES,)),
    "the root alone": Setting(options={"auto_wrap_policy": None}),
    "layers": Setting(options={"auto_wrap_policy": oracle.is_layer}),
    "its own": Setting(),
}


def _prepare(net: oracle.Net, kind: str) -> None:
    """Take the layer norms out of a net that is differentiated three times: torch's third derivative is not exact."""
    if kind == "second derivative":
        for block in net.blocks:
            block.norm = nn.Identity()


class _AutomaticModule(Lit):
    def __init__(self, kind: str) -> None:
        super().__init__("momentum")
        self.kind = kind
        _prepare(self.net, kind)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = STEPS[self.kind](self.new_step(batch, Tensor.backward))
        self.losses.append(loss.detach())
        return loss

    def new_step(self, batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any]) -> Step:
        x, y = batch
        return Step(net=self.net, module=self.net, x=x, y=y, backward=backward, optimizer=self.optimizers())


class _ManualModule(_AutomaticModule):
    def __init__(self, kind: str, setting: Setting, *, raw: bool) -> None:
        super().__init__(kind)
        self.automatic_optimization = False
        self.setting, self.raw = setting, raw

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        backward = Tensor.backward if self.raw else self.manual_backward
        accumulate, clip = self.setting.accumulate, self.setting.clip
        if batch_idx % accumulate == 0:
            optimizer.zero_grad()
        loss = STEPS[self.kind](self.new_step(batch, backward))
        self.losses.append(loss.detach())
        backward(loss / accumulate)
        if (batch_idx + 1) % accumulate == 0:
            if clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=_CLIP[clip], gradient_clip_algorithm=clip)
            optimizer.step()


def _fit(strategy: str, tmp: str, front: str, kind: str, setting: Setting, batches: int = BATCHES) -> Trained:
    arguments: dict[str, Any] = setting.precision_of(MixedPrecision)
    module = _ManualModule(kind, setting, raw="raw" in front) if "by hand" in front else _AutomaticModule(kind)
    if module.automatic_optimization:
        arguments["accumulate_grad_batches"] = setting.accumulate
        if setting.clip is not None:
            arguments |= {"gradient_clip_val": _CLIP[setting.clip], "gradient_clip_algorithm": setting.clip}
    run = new_trainer(tmp, strategy, setting.ranks, setting.options or None, **arguments)
    run.fit(module, loader(batches, setting.ranks))
    state = module.state_dict() if setting.ranks == 1 else full_state(run.strategy)
    return means(module.losses), {name: tensor.detach().clone() for name, tensor in state.items()}


def _fabric_fit(strategy: str, kind: str, setting: Setting, batches: int = BATCHES) -> Trained:
    (precision,) = setting.precision_of(FabricMixedPrecision).values()
    fabric = new_fabric(strategy, setting.ranks, setting.options or None, precision)
    net = oracle.new_net()
    _prepare(net, kind)
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    losses = []
    for index, batch in enumerate(oracle.global_batches(batches)):
        x, y = own_share(fabric, batch)
        is_last = (index + 1) % setting.accumulate == 0
        if index % setting.accumulate == 0:
            optimizer.zero_grad()
        with fabric.no_backward_sync(model, enabled=not is_last):
            step = Step(net=model, module=net, x=x, y=y, backward=fabric.backward, optimizer=optimizer)
            loss = STEPS[kind](step)
            losses.append(loss.detach())
            fabric.backward(loss / setting.accumulate)
        if is_last and setting.clip == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=_CLIP["norm"])
        elif is_last and setting.clip == "value":
            fabric.clip_gradients(model, optimizer, clip_val=_CLIP["value"])
        if is_last:
            optimizer.step()
    return means(losses), {f"net.{name}": tensor for name, tensor in full_state(fabric.strategy).items()}


def _train_each(
    strategy: str, tmp: str, front: str, kinds: Collection[str], setting: Setting, batches: int
) -> dict[str, Trained | str]:
    """For each kind of step, the losses and weights after training, or the message of a refusal."""
    outcomes: dict[str, Trained | str] = {}
    for kind in kinds:
        try:
            if front == "fabric":
                outcomes[kind] = _fabric_fit(strategy, kind, setting, batches)
            else:
                outcomes[kind] = _fit(strategy, tmp, front, kind, setting, batches)
        except FSDPError as error:
            outcomes[kind] = str(error)
        except RuntimeError as error:  # torch's own error counts as a refusal if a note says what to write instead
            if not getattr(error, "__notes__", ()):
                raise
            outcomes[kind] = "\n".join([str(error), *error.__notes__])
    return outcomes


@dataclass(frozen=True)
class NeededPart:
    """A part of a library without which a kind of step is wrong.

    Attributes:
        target: The module or the class that has the part as an attribute.
        name: The name of the attribute.
        instead: What replaces the attribute.
        front: The front end.
        what: The kind of step that is then wrong, a key of :data:`STEPS`.
    """

    target: Any
    name: str
    instead: Any
    front: str
    what: str


def assert_needed(
    ranks: Ranks, tmp_path: Path, strategy: str, parts: Callable[[], Mapping[str, NeededPart]], name: str
) -> None:
    """Check that :class:`ManyPassesSuite` would notice if a part of a library were missing.

    Args:
        ranks: The ranks.
        tmp_path: A folder.
        strategy: The name of the strategy.
        parts: A function that returns the parts, by name. Each rank calls it, so it must be picklable.
        name: The name of the part.
    """
    part = parts()[name]
    want = _fit("auto", str(tmp_path), "by hand" if part.front == "fabric" else part.front, part.what, _ALONE)
    for got in ranks.run(2, _train_without, parts, name, strategy, str(tmp_path)):
        assert _differences(got, want) is not None, "ManyPassesSuite would not see that it is missing"


_ALONE = Setting().unsharded()


def _train_without(parts: Callable[[], Mapping[str, NeededPart]], name: str, strategy: str, tmp: str) -> Trained | str:
    part = parts()[name]
    with mock.patch.object(part.target, part.name, part.instead):
        try:
            if part.front == "fabric":
                return _fabric_fit(strategy, part.what, Setting())
            return _fit(strategy, tmp, part.front, part.what, Setting())
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def assert_right_on_one_rank(ranks: Ranks, tmp_path: Path, strategy: str, what: str) -> None:
    """Check a kind of step under Fabric on one rank, on which some libraries shard nothing.

    Args:
        ranks: The ranks.
        tmp_path: A folder.
        strategy: The name of the strategy.
        what: The kind of step.
    """
    setting = Setting(ranks=1, options={"state_dict_type": "full"})
    (got,) = ranks.run(1, _fabric_fit, strategy, what, setting)
    assert _differences(got, _fit("auto", str(tmp_path), "by hand", what, _ALONE)) is None


#: What may write to parameters between a forward pass and its backward pass, in :func:`assert_writes_are_seen`.
WRITTEN_BEFORE_BACKWARD = ("by hand", "by hand between two calls", "an optimizer's step", "a checkpoint", "a bias")


def assert_writes_are_seen(ranks: Ranks, tmp_path: Path, strategy: str, how: str) -> None:
    """Check that writes to parameters between a forward pass and its backward pass are refused, as by plain torch.

    Args:
        ranks: The ranks.
        tmp_path: A folder.
        strategy: The name of the strategy.
        how: One of :data:`WRITTEN_BEFORE_BACKWARD`. Writes to a bias are not refused: no graph needs its values.
    """
    for got in ranks.run(2, _write_before_backward, strategy, str(tmp_path / "saved"), how):
        if how == "a bias":
            loop = Loop(None, oracle.sgd, _net_without_gains())
            loop.backward(_write_after_forward(loop, how))
            loop.optimizer.step()
            torch.testing.assert_close(got, loop.state(), atol=FP32_TOLERANCE, rtol=0)
        else:
            assert isinstance(got, str), "computed with other values than those of the forward pass"
            assert_says(got, "'blocks.1.", "written to between the forward pass and this backward pass")


def _write_before_backward(strategy: str, folder: str, how: str) -> str | dict[str, Tensor]:
    """Return the error with its notes, or the weights after the step if there is none."""
    loop = Loop(strategy, oracle.sgd, _net_without_gains())
    loop.fabric.save(folder, {"model": loop.model})
    losses = _write_after_forward(loop, how)
    if how == "a checkpoint":
        loop.fabric.load(folder, {"model": loop.model})

    def step() -> dict[str, Tensor]:
        loop.backward(losses)
        loop.optimizer.step()
        return loop.state()

    return result_or_refusal((FSDPError, RuntimeError), step)


def _net_without_gains() -> oracle.Net:
    """Return a net without 0-dim parameters, writes to which torch itself refuses: they are not sharded."""
    net = oracle.new_net()
    for block in net.blocks:
        del block.gain
        vars(block)["gain"] = 0.5
    return net


def _write_after_forward(loop: Loop, how: str) -> Tensor:
    """Call blocks, write to parameters, and return the loss; "by hand between two calls", a call follows the write."""
    blocks = loop.net.blocks
    ((x, y),) = loop.batches(1)
    first = mse_loss(blocks[1](blocks[0](x)), y)
    with torch.no_grad():
        for name, parameter in loop.net.named_parameters():
            if how.startswith("by hand") or (how == "a bias" and name.endswith("down.bias")):
                parameter.mul_(0.9)
    if how == "an optimizer's step":
        loop.backward(mse_loss(blocks[1](x), y))
        loop.optimizer.step()
    return first + (mse_loss(blocks[1](x), y) if how.endswith("calls") else 0.0)


def assert_recovers_without_fabric(ranks: Ranks, strategy: str) -> None:
    """Check ``loss.backward()`` under Fabric after an exception in a backward pass that was caught.

    Args:
        ranks: The ranks.
        strategy: The name of the strategy.
    """
    want = _step_by_raw_gradients(Loop(None, oracle.sgd))
    for weights, message in ranks.run(2, _backward_without_fabric, strategy):
        torch.testing.assert_close(weights, want, atol=FP32_TOLERANCE, rtol=0)
        assert_says(message, "an exception has interrupted a backward pass", "optimizer.zero_grad()")


def _backward_without_fabric(strategy: str) -> tuple[dict[str, Tensor], str]:
    """Return the weights if gradients were cleared after the exception, and the refusal if they were not."""
    loop = Loop(strategy, oracle.sgd)
    weights = _step_by_raw_gradients(loop)
    loss = _loss_before_interruption(loop, clears=False)
    message = refusal(ShardingError, loss.backward)
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()  # of another model
    return weights, message


def _step_by_raw_gradients(loop: Loop) -> dict[str, Tensor]:
    _loss_before_interruption(loop, clears=True).backward()
    with torch.no_grad():
        for parameter in loop.net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    return loop.state()


def _loss_before_interruption(loop: Loop, *, clears: bool) -> Tensor:
    """Compute a loss, then let an exception end a backward pass of another loss, and return the first loss."""
    blocks = loop.net.blocks
    ((x, y),) = loop.batches(1)
    loss = mse_loss(blocks[1](x), y)
    inner = blocks[0](x)
    inner.register_hook(_fail)
    with contextlib.suppress(_CaughtError):
        loop.backward(mse_loss(blocks[2](inner), y))
    if clears:
        loop.optimizer.zero_grad()
    return loss


def _differences(got: Trained | str, want: Trained, precision: str | None = None) -> str | None:
    if isinstance(got, str):
        return f"refused: {got}"
    # torch.max() returns NaN if there is one; Python's max() may pass over it.
    losses = float((torch.tensor(got[0]) - torch.tensor(want[0])).abs().max())
    weights = float(torch.stack([(got[1][name].cpu() - tensor).abs().max() for name, tensor in want[1].items()]).max())
    if precision is None:
        is_right = max(losses, weights) <= FP32_TOLERANCE
    else:
        initial = {f"net.{name}": tensor for name, tensor in oracle.new_net().state_dict().items()}
        error = sum(float((got[1][name].cpu().float() - tensor).square().sum()) for name, tensor in want[1].items())
        change = sum(float((initial[name] - tensor).square().sum()) for name, tensor in want[1].items())
        is_right = error <= _MAX_RELATIVE_ERROR**2 * change  # both are squares of norms
    return None if is_right else f"losses differ by {losses:.1e}, weights by {weights:.1e}"


_by_hand = requires(Capability.MANUAL_OPTIMIZATION)


def _parameter_set(name: str, setting: Setting) -> Any:
    needs = [*needs_of(setting.options), *setting.needs]
    return pytest.param(name, marks=[requires(*needs)] if needs else [], id=name)


def _seed() -> int:
    return int(os.environ.get(SEED, "17"))


def _draw_part(kinds: list[str], parts: int, name: str) -> list[str]:
    """Divide the kinds of steps into parts, and draw a part by the seed. ``parts`` seeds in a row draw all of them."""
    return kinds[(_seed() + zlib.crc32(name.encode())) % parts :: parts]


class ManyPassesSuite(Clauses):
    """A step may do what a step of plain torch may.

    Attributes:
        own_step_options: Meshes with options of this strategy alone, by name. Each run of the suite draws one.
        refused_steps: By setting or front end, the kinds of steps that may be refused, or raise an error of torch with
            a note.
        step_parts: The number of parts that the kinds of steps are divided in. A test without options trains one of
            them, which is drawn. A backend that compiles a program for each kind may set it to 3, so that three runs
            train all kinds.
    """

    own_step_options: ClassVar[Mapping[str, DeclaredMesh]] = {}
    refused_steps: ClassVar[Mapping[str, Collection[str]]] = {}
    step_parts: ClassVar[int] = 1

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
        setting = Setting(accumulate=BATCHES - 1 if front == "accumulated" else 1)
        self._assert_right(
            ranks, tmp_path, front, _draw_part(setting.kinds(), self.step_parts, front), setting, BATCHES
        )

    @pytest.mark.everything
    @pytest.mark.parametrize("name", [_parameter_set(name, setting) for name, setting in SETTINGS.items()])
    def test_steps_of_many_passes_with_options(self, ranks: Ranks, tmp_path: Path, name: str) -> None:
        """With options too, losses and weights must be those of one unsharded process.

        One front end and a third of the kinds of steps are drawn; three seeds in a row cover all kinds.
        """
        draw = random.Random(f"{_seed()} {name}")
        fronts = ["fabric", "automatic"]
        if Capability.MANUAL_OPTIMIZATION in registry.strategies()[self.strategy].capabilities:
            fronts.append("by hand")
        front = draw.choice(fronts)
        setting = SETTINGS[name]
        test_name = name
        if name == "its own":
            if not self.own_step_options:
                pytest.skip("the strategy's tests name no options of its own")
            name = draw.choice(sorted(self.own_step_options))
            mesh = self.own_step_options[name]
            setting = Setting(ranks=mesh.ranks, options=mesh.options_for("" if front == "fabric" else "net."))
        elif "reshard_after_forward" in setting.options:
            setting = Setting(options=self.asks.get(Capability.RESHARD_AFTER_FORWARD, setting.options))
        kinds = _draw_part(setting.kinds(), 3, test_name)
        self._assert_right(ranks, tmp_path, front, kinds, setting, max(BATCHES, 2 * setting.accumulate), name)

    def _assert_right(
        self,
        ranks: Ranks,
        tmp_path: Path,
        front: str,
        kinds: Collection[str],
        setting: Setting,
        batches: int,
        name: str = "",
    ) -> None:
        trainer_front = "by hand" if front == "fabric" else front
        unsharded = setting.unsharded()
        expected = {kind: _fit("auto", str(tmp_path), trainer_front, kind, unsharded, batches) for kind in kinds}
        refused = {*self.refused_steps.get(name, ()), *self.refused_steps.get(front, ())}
        trained = ranks.run(setting.ranks, _train_each, self.strategy, str(tmp_path), front, kinds, setting, batches)
        for outcomes in trained:
            faults = {}
            for kind, outcome in outcomes.items():
                message = _differences(outcome, expected[kind], setting.precision)
                may_be_refused = isinstance(outcome, str) and kind in refused
                if message is not None and not may_be_refused:
                    faults[kind] = message
            assert faults == {}, f"steps that are wrong, under {front}, {name or 'by default'}: {faults}"
