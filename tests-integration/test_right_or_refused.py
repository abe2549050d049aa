"""Steps that do what a library may not gather in: each is right, or refused in words, and none ends in a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from fsdp_core.errors import FSDPError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, Trained
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, means, new_fabric, new_trainer

STEPS = 2
Net = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step.

    Attributes:
        loss: Computes the loss with the net, from inputs and targets.
        words: What the refusal says, by strategy; a strategy that is not named is right.
        edit: Edits the net before it is sharded.
        before_step: Changes gradients, between the backward pass and the optimizer's step.
        after_step: Changes parameters after it. If it returns a loss, that is one of the run's too.
        options: The strategy's options.
        fronts: The front ends.
        strategies: The strategies that have these options.
    """

    loss: Callable[[Net, Tensor, Tensor], Tensor] = lambda net, x, y: mse_loss(net(x), y)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    edit: Callable[[Any], None] = lambda net: None
    before_step: Callable[[Any], None] = lambda net: None
    after_step: Callable[[Any, Any, Tensor, Tensor], Tensor | None] = lambda net, optimizer, x, y: None
    options: dict[str, Any] = field(default_factory=dict)
    fronts: tuple[str, ...] = ("fabric", "automatic")
    strategies: tuple[str, ...] = ("fsdp2", "fsdp_native")


def _pushed_forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
    func: Any = torch.func
    output, tangent = func.jvp(net, (x,), (x.flip(1),))
    loss: Tensor = mse_loss(output, y) + tangent.square().mean()
    return loss


def _mapped(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(torch.func.vmap(net)(x), y)


def _pulled_back(net: Net, x: Tensor, y: Tensor) -> Tensor:
    func: Any = torch.func
    output, pull = func.vjp(net, x)
    loss: Tensor = mse_loss(output, y) + pull(torch.ones_like(output))[0].square().mean()
    return loss


def _functional(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """What the refusals say to write."""
    functional: Any = torch.autograd.functional
    output, tangent = functional.jvp(net, x, x.flip(1), create_graph=True)
    jacobian = functional.jacobian(net, torch.linspace(-1, 1, x.shape[1])[None], create_graph=True)
    loss: Tensor = mse_loss(output, y) + tangent.square().mean() + jacobian.square().mean()
    return loss


def _batched(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    output = net(x)
    directions = torch.eye(x.shape[1])[:, None].expand(-1, len(x), -1)
    (jacobian,) = torch.autograd.grad(output, x, directions, is_grads_batched=True, create_graph=True)
    return mse_loss(output, y) + jacobian.square().mean()


def _dual(net: Net, x: Tensor, y: Tensor) -> Tensor:
    forward_ad: Any = torch.autograd.forward_ad
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.flip(1))))
    loss: Tensor = mse_loss(output, y) + tangent.square().mean()
    return loss


def _of_unit(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A gradient with respect to parameters of units, which ``autograd.grad`` would leave out without a word."""
    loss = mse_loss(net(x), y)
    named = cast("nn.Module", net).named_parameters()
    parameters = [parameter for name, parameter in named if "frozen" not in name]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    return loss + 0.1 * torch.stack([gradient.sum() for gradient in gradients if gradient is not None]).sum()


class _WritingBlock(oracle.Block):
    """Writes to its input, and its caller to its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.1)).mul_(0.9)


def _let_write(net: Any) -> None:
    for block in net.blocks:
        block.__class__ = _WritingBlock


class _Reversible(torch.autograd.Function):
    """Runs a block without a graph, and again in the backward pass, whose gradients it returns for its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        output: Tensor = block(x)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.block(x)
        of_x, *of_parameters = torch.autograd.grad(output, (x, *parameters), gradient)
        return of_x, None, *of_parameters


class _ReversibleBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Reversible.apply(x, self.block, *self.block.parameters())  # type: ignore[no-untyped-call]
        return output


def _make_reversible(net: Any) -> None:
    net.blocks = nn.Sequential(*(_ReversibleBlock(block) for block in net.blocks))


def _penalty(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A penalty over what is in units, outside of them."""
    weights = [block.up.weight for block in cast("Any", net).blocks]
    return mse_loss(net(x), y) + 0.1 * torch.stack([weight.square().sum() for weight in weights]).sum()


def _penalty_of_all(net: Any, x: Tensor, y: Tensor) -> Tensor:
    penalty = torch.stack([p.square().sum() for p in net.parameters()]).sum()
    return mse_loss(net(x), y) + 0.1 * cast(Tensor, penalty)


def _orthogonal(net: Any, x: Tensor, y: Tensor) -> Tensor:
    weight: Tensor = net.blocks[0].up.weight
    return mse_loss(net(x), y) + 0.1 * (weight @ weight.T).square().sum()


def _weighed_by_norm(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(net(x), y) * (1 + net.blocks[0].up.weight.detach().square().sum().item())


def _moved_by_hand(net: Any, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(net.parameters())
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, old in zip(parameters, before, strict=True):
            p.mul_(0.9).add_(torch.zeros_like(old))
            p.lerp_(old, 0.5)
    for p in parameters:
        p.data.clamp_(-1.0, 1.0)
    return mse_loss(net(x), y)


def _recomputed(net: Net, x: Tensor, y: Tensor) -> Tensor:
    output: Any = checkpoint(net, x, use_reentrant=False)
    return mse_loss(output, y)


def _called_in_backward(net: Net, x: Tensor, y: Tensor) -> Tensor:
    output = net(x)

    @torch.no_grad()
    def scale(gradient: Tensor) -> Tensor:
        return gradient * (1 + net(torch.ones_like(x[:2])).mean())

    output.register_hook(scale)
    return mse_loss(output, y)


def _add_idle(net: Any) -> None:
    net.idle = nn.Linear(2, 2)
    net.idle.weight.data.fill_(0.5)
    net.idle.bias.data.fill_(0.5)


def _beside_idle(net: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mse_loss(net(x), y)
    used, idle = net.blocks[0].up.weight, net.idle.weight
    with pytest.raises(RuntimeError, match="Set allow_unused=True"):
        torch.autograd.grad(loss, [used, idle], retain_graph=True)
    gradient, nothing = torch.autograd.grad(loss, [used, idle], create_graph=True, allow_unused=True)
    assert nothing is None
    return loss + 0 * gradient.sum()


class _LeavingBlock(oracle.Block):
    """Returns nothing: its output is an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.left = super().forward(x)


class _ReadingBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, x: Tensor) -> Any:
        self.block(x)
        return self.block.left


def _let_leave(net: Any) -> None:
    for block in net.blocks:
        block.__class__ = _LeavingBlock
    net.blocks = nn.Sequential(*map(_ReadingBlock, net.blocks))


class _GivingBlock(oracle.Block):
    """Returns a part of its weight beside its output."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight.t()[0]


class _TakingBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output, weight = self.block(x)
        result: Tensor = output + weight.sum()
        return result


def _let_give(net: Any) -> None:
    for block in net.blocks:
        block.__class__ = _GivingBlock
    net.blocks = nn.Sequential(*map(_TakingBlock, net.blocks))


class _Spectral(nn.Module):
    """A layer whose only parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.1, 0.9, 4) * (1 + 0.5j))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.factor, n=x.shape[1], dim=1)
        return output


def _make_spectral(net: Any) -> None:
    net.blocks = nn.Sequential(*net.blocks, _Spectral())


def _zero_rows_of_gradients(net: Any) -> None:
    net.inp.weight.grad[0].zero_()
    net.inp.weight.grad[2:4] = 0
    net.blocks[0].up.weight.grad[1].mul_(2.0)


def _write_to_rows(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    net.blocks[0].up.weight[1:3].mul_(0.5)
    net.blocks[1].up.weight.data[0] = 0.1
    return _write_to_parts_of_no_unit(net, optimizer, x, y)


def _write_to_parts_of_no_unit(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = net.inp.weight
    weight[0].zero_()
    weight.narrow(0, 1, 2).mul_(0.5)
    weight.chunk(3)[2].add_(0.1)
    weight.diagonal().mul_(0.9)
    weight.data[3] = weight.data[4]
    return mse_loss(net(x), y)


def _write_to_data(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """As attacks on embeddings do, between two calls."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.data.mul_(1.1)
    loss = mse_loss(net(x), y)
    for parameter in parameters:
        parameter.data.mul_(0.9)
    return loss + mse_loss(net(x), y)


def _decay_matrices(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.dim() > 1 and parameter.ndim == 2:
            parameter.mul_(0.9)
    torch._foreach_mul_(optimizer.param_groups[0]["params"], 0.99)


_INSTEAD = ("torch.autograd.functional.vjp()", "create_graph=True")
_REVERSE = ("torch.func's grad, vjp, jacrev or hessian", *_INSTEAD)

_OF_SHARD = (
    "torch.autograd.grad() with respect to",
    "which is sharded",
    "auto_wrap_policy=None",
    "mark_forward_method()",
)
_OF_FUNCTION = ("auto_wrap_policy=None",)
_OF_PIECE = ("would see this rank's piece of it alone", "weight_decay", "mark_forward_method()", "gathered(module)")
_OF_DTENSOR = ("there it is a DTensor, a shard", "weight_decay", "mark_forward_method()")

KINDS = {
    "torch.func.jvp": Kind(loss=_pushed_forward, words={"fsdp_native": ("torch.func's jvp", *_INSTEAD, "'fsdp2'")}),
    "torch.func.vmap": Kind(loss=_mapped, words={"fsdp_native": ("torch.func's vmap", "the batch")}),
    "torch.func.vjp": Kind(loss=_pulled_back, words={"fsdp2": _REVERSE, "fsdp_native": _REVERSE}),
    "torch.autograd.functional": Kind(loss=_functional),
    "is_grads_batched": Kind(loss=_batched),
    "dual level": Kind(loss=_dual, words={"fsdp2": ("dual_level()", *_INSTEAD, "torch.func.jvp()")}),
    "gradients of parameters of units": Kind(loss=_of_unit, words={"fsdp2": _OF_SHARD, "fsdp_native": _OF_SHARD}),
    "gradients of parameters of no unit": Kind(
        loss=_of_unit, options={"auto_wrap_policy": None}, fronts=("automatic", "by hand")
    ),
    "written inputs": Kind(edit=_let_write, words={"fsdp2": ("fully_shard has made", "x = x.clone()")}),
    "complex parameters": Kind(
        edit=_make_spectral,
        options={"auto_wrap_policy": {oracle.Block, _Spectral}},
        words={"fsdp_native": (".factor' of _Spectral is complex", "strategy='fsdp2'", "torch.view_as_complex")},
    ),
    "penalty without sharding": Kind(
        loss=_penalty,
        options={"sharding_strategy": "NO_SHARD"},
        words={"fsdp_native": ("was computed with", ".up.weight' outside of", "weight_decay", "auto_wrap_policy=None")},
        strategies=("fsdp_native",),
    ),
    "penalty of all parameters": Kind(loss=_penalty_of_all, words={"fsdp2": _OF_DTENSOR, "fsdp_native": _OF_PIECE}),
    "product with a weight of a unit": Kind(
        loss=_orthogonal, words={"fsdp2": _OF_DTENSOR, "fsdp_native": _OF_PIECE}, fronts=("fabric",)
    ),
    "norm of a weight of a unit": Kind(
        loss=_weighed_by_norm,
        words={"fsdp2": ("float(value.full_tensor())",), "fsdp_native": _OF_PIECE},
        fronts=("fabric",),
    ),
    "parameters moved by hand": Kind(loss=_moved_by_hand, fronts=("fabric",)),
    "recomputed net": Kind(loss=_recomputed),
    "call of the net in its backward pass": Kind(loss=_called_in_backward),
    "gradients beside an idle layer": Kind(
        edit=_add_idle, loss=_beside_idle, options={"auto_wrap_policy": None}, fronts=("automatic", "by hand")
    ),
    "outputs in attributes": Kind(edit=_let_leave, options={"auto_wrap_policy": {_LeavingBlock}}),
    "returned parameters": Kind(
        edit=_let_give,
        options={"auto_wrap_policy": {_GivingBlock}},
        words=dict.fromkeys(("fsdp2", "fsdp_native"), ("_GivingBlock, returned one of its parameters", ".clone()")),
    ),
    "reversible blocks": Kind(
        edit=_make_reversible,
        options={"auto_wrap_policy": {oracle.Block}},
        words={"fsdp2": _OF_FUNCTION, "fsdp_native": _OF_FUNCTION},
    ),
    "rows of gradients": Kind(
        before_step=_zero_rows_of_gradients,
        words={"fsdp_native": ("__getitem__ of a gradient", "padding_idx")},
        fronts=("fabric", "automatic", "by hand"),
    ),
    "rows of weights": Kind(after_step=_write_to_rows, words={"fsdp_native": _OF_PIECE}, fronts=("fabric", "by hand")),
    "parts of a weight of no unit": Kind(after_step=_write_to_parts_of_no_unit, fronts=("by hand",)),
    "data of weights": Kind(after_step=_write_to_data, fronts=("fabric", "by hand")),
    "decay of matrices alone": Kind(after_step=_decay_matrices, fronts=("fabric", "automatic", "by hand")),
    "reversible blocks in no unit": Kind(edit=_make_reversible, options={"auto_wrap_policy": None}),
}


class _Module(Lit):
    def __init__(self, kind: Kind, *, by_hand: bool) -> None:
        super().__init__()
        self.kind, self.automatic_optimization = kind, not by_hand
        kind.edit(self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.kind.loss(self.net, *batch)
        self.losses.append(loss.detach())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self._after_step(batch)
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.kind.before_step(self.net)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.automatic_optimization:
            self._after_step(batch)

    def _after_step(self, batch: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            loss = self.kind.after_step(self.net, self.optimizers(), *batch)
        if loss is not None:
            self.losses.append(loss)


def _train(strategy: str, tmp: str, world_size: int, kind: Kind, front: str) -> Trained:
    if front != "fabric" or world_size == 1:
        module = _Module(kind, by_hand=front == "by hand")
        run = new_trainer(tmp, strategy, world_size, kind.options if world_size > 1 else None)
        run.fit(module, loader(STEPS, world_size))
        state = module.state_dict() if world_size == 1 else full_state(run.strategy)
        return means(module.losses), {name.removeprefix("net."): tensor.clone() for name, tensor in state.items()}
    fabric = new_fabric(strategy, world_size, kind.options)
    net = oracle.new_net()
    kind.edit(net)
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for batch in oracle.global_batches(STEPS):
        x, y = (tensor[fabric.global_rank :: world_size] for tensor in batch)
        optimizer.zero_grad()
        losses.append(kind.loss(model, x, y))
        fabric.backward(losses[-1])
        with torch.no_grad():
            kind.before_step(net)
            optimizer.step()
            loss = kind.after_step(model, optimizer, x, y)
        losses += [] if loss is None else [loss]
    return means(losses), full_state(fabric.strategy)


def _train_all(strategy: str, tmp: str) -> dict[tuple[str, str], Trained | str]:
    outcomes: dict[tuple[str, str], Trained | str] = {}
    for name, kind in KINDS.items():
        for front in kind.fronts if strategy in kind.strategies else ():
            try:
                outcomes[name, front] = _train(strategy, tmp, 2, kind, front)
            except FSDPError as refused:
                outcomes[name, front] = str(refused)
            except RuntimeError as error:  # torch's own, with a note of ours
                outcomes[name, front] = "\n".join(
                    note for note in getattr(error, "__notes__", ()) if note.startswith("fsdp-core")
                )
    return outcomes


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Losses and weights of one unsharded process."""
    tmp = str(tmp_path_factory.mktemp("one"))
    return {name: _train("auto", tmp, 1, kind, "automatic") for name, kind in KINDS.items()}


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_steps_are_right_or_refused(ranks: RankPool, tmp_path: Path, wanted: dict[str, Trained], strategy: str) -> None:
    for outcomes in ranks.run(2, _train_all, strategy, str(tmp_path)):
        for (name, front), outcome in outcomes.items():
            words = KINDS[name].words.get(strategy)
            if words is not None:
                assert isinstance(outcome, str), f"{name}, {front}: nothing was refused"
                assert_says(outcome, *words)
                continue
            assert not isinstance(outcome, str), f"{name}, {front}: {outcome}"
            losses, state = wanted[name]
            assert outcome[0] == pytest.approx(losses, abs=FP32_TOLERANCE), f"{name}, {front}"
            for tensor, value in state.items():
                worst = float((outcome[1][tensor] - value).abs().max())
                assert worst <= FP32_TOLERANCE, f"{name}, {front}: {tensor} differs by {worst:.1e}"
