"""Optimizers over runs of elements: right, or refused before they step; and what they hold besides their groups."""

from __future__ import annotations

import inspect
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from checkpoint_ranks import started
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.optimizers import trial
from fsdp_core.sharding.optimizers.rebinding import rebind_optimizer
from fsdp_core.sharding.optimizers.small_params import ParamSpec, as_unsharded, new_small_param
from fsdp_core.sharding.optimizers.trial import check_steps
from fsdp_core.sharding.optimizers.trial_state import layout_of_small_params
from fsdp_core.state.layout import FlatRange, Layout, Part, stand_in
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state
from fsdp_core.testing import RankPool

#: What the documentation's table says of torch's optimizers over 1-D pieces.
REFUSED_OVER_PIECES = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}

OF_TORCH = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


class Model:
    """Whole parameters as an optimizer gets them, and the pieces that a rank holds of them."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.pieces = [nn.Parameter(torch.zeros(3)) for _ in shapes]
        run = FlatRange(offset=0, start=0, length=3)
        self.layout: Layout = {
            piece: (Part(name=str(number), shape=shape, range=run),)
            for number, (piece, shape) in enumerate(zip(self.pieces, shapes, strict=True))
        }

    def rebind(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        pieces = dict(zip(self.params, self.pieces, strict=True))
        return rebind_optimizer(optimizer, lambda p: p if p in self.layout else pieces.get(p), self.layout)


def variants(name: str) -> list[dict[str, Any]]:
    known = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({word: True} for word in ("foreach", "fused", "amsgrad", "centered", "nesterov") if word in known)]


@pytest.mark.parametrize("name", OF_TORCH)
def test_each_optimizer_of_torch_over_pieces(name: str) -> None:
    for settings in variants(name):
        model = Model((6, 4), *([] if name == "Muon" else [(6,)]))
        extra = {"momentum": 0.9} if settings.get("nesterov") and name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.params, lr=0.1, **settings, **extra)
        if name in REFUSED_OVER_PIECES:
            with pytest.raises(OptimizerMismatchError, match=name):
                model.rebind(optimizer)
            continue
        model.rebind(optimizer)
        for piece in model.pieces:
            piece.grad = torch.ones(3)
        optimizer.step()
        assert all(piece.any() for piece in model.pieces)
        assert set(optimizer.state) <= set(model.pieces)


def test_state_from_before_the_first_step_is_made_anew() -> None:
    model = Model((6, 4))
    optimizer = model.rebind(torch.optim.Adagrad(model.params, initial_accumulator_value=0.25))
    ((piece, state),) = optimizer.state.items()
    assert piece is model.pieces[0]
    assert state["sum"].tolist() == [0.25] * 3
    assert state["step"] == 0


class Copies(torch.optim.SGD):
    """Copies parameters when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["first"] = parameter.detach().clone()


def test_copies_of_parameters_are_refused() -> None:
    """Also of those that stand in for them in ``configure_optimizers``, all of whose elements are alike."""
    for like in (torch.randn(24), stand_in((6, 4), torch.randn(3)).detach()):
        model = Model((6, 4))
        model.params = [nn.Parameter(like.reshape(6, 4))]
        with pytest.raises(OptimizerMismatchError, match="has copied them, and its state \\('first'\\)"):
            model.rebind(Copies(model.params))


class Holds(torch.optim.SGD):
    """Keeps parameters in places of its own."""

    def __init__(self, params: list[Tensor], inner: torch.optim.Optimizer) -> None:
        super().__init__(params, lr=0.1)
        self.inner = inner
        self.listed = list(params)
        self.paired = (params[0], "of")
        self.named = {"first": params[0], params[1]: 1}
        self.one = params[1]


def test_parameters_held_outside_of_groups_are_replaced() -> None:
    model = Model((6, 4), (6,))
    inner = torch.optim.AdamW(model.params)
    optimizer: Any = model.rebind(Holds(list(model.params), inner))
    first, second = model.pieces
    assert optimizer.listed == [first, second]
    assert optimizer.paired[0] is first
    assert optimizer.named["first"] is first
    assert second in optimizer.named
    assert optimizer.one is second
    assert inner.param_groups[0]["params"] == [first, second]


class OwnBuffers(torch.optim.SGD):
    """Keeps a tensor for each parameter where no state is looked for."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.buffers = [torch.zeros_like(parameter) for parameter in params]


def by_the_parameters_norm(parameter: Tensor, grad: Tensor) -> Tensor:
    """As LARS does, a small part of the gradient."""
    return grad.mul(1e-3).mul(parameter.norm()).div(grad.norm())


class OneByOne(torch.optim.SGD):
    """Does something to each parameter that has a gradient, and then steps as SGD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.prepare(parameter, group)
        return super().step()

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Strangers(OneByOne):
    """Makes something of a gradient."""

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.update = update

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.grad.copy_(self.update(parameter, parameter.grad))


class Later(OneByOne):
    """Elementwise in its first step, and by the norm of what it is given from then on.

    Args:
        params: The parameters.
        lr: The learning rate.
        spikes: Whether it is so where a gradient is much larger than the last one only.
    """

    def __init__(self, params: Any, *, lr: float, spikes: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.spikes = spikes

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        before, now = self.state[parameter].get("norm"), parameter.grad.norm()
        self.state[parameter]["norm"] = now
        if before is not None and (now > 5 * before or not self.spikes):
            parameter.grad.div_(now + 1e-3)


class Keeps(OneByOne):
    """Keeps a history of gradients, whose shape is not theirs."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        self.state[parameter]["history"] = torch.stack([parameter.grad, parameter.grad])


NOT_ELEMENTWISE = "looks at more of a parameter than single elements"


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (OwnBuffers, {}, "keeps tensors of its parameters' shapes outside of its state"),
        (Keeps, {"lr": 0.1}, r"'history' of shape .* a checkpoint would hold that of one rank"),
        (Strangers, {"update": lambda parameter, grad: grad.div(grad.norm())}, f"{NOT_ELEMENTWISE}, such as its shape"),
        (Strangers, {"update": by_the_parameters_norm}, f"{NOT_ELEMENTWISE}, such as its shape"),
        # Also where the learning rate begins at 0, as a warm-up's does.
        *((Later, {"lr": lr, "spikes": spikes}, NOT_ELEMENTWISE) for lr in (0.1, 0.0) for spikes in (False, True)),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_over_pieces(
    kind: Any, options: dict[str, Any], why: str
) -> None:
    model = Model((6, 4))
    with pytest.raises(OptimizerMismatchError, match=why):
        model.rebind(kind(list(model.params), **options))


def test_unknown_elementwise_optimizer_is_accepted() -> None:
    model = Model((6, 4))
    torch.manual_seed(3)
    model.rebind(Strangers(model.params, lambda parameter, grad: grad.sign()))
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))  # nothing else was drawn


def of_one_shape(parameter: Tensor, grad: Tensor) -> Tensor:
    if parameter.shape not in ((6, 4), (3,)):
        raise RuntimeError("made for another shape")
    return grad.sign()


def test_optimizer_that_cannot_be_tried_gets_a_warning() -> None:
    model = Model((6, 4))
    with pytest.warns(UserWarning, match=r"Strangers could not be tried .*made for another shape.*devices=1"):
        model.rebind(Strangers(model.params, of_one_shape))


class ByTheNormOfAll(torch.optim.AdamW):
    """Clips by the norm of all gradients before it steps, as LAMB does: Adam's update hides a constant factor."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.zeros(())
        for grad in grads:
            grad.div_(total + grad.norm())
        return super().step(closure)


class Rows(OneByOne):
    """Scales each gradient by its largest row, of that parameter alone."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        if parameter.ndim > 1:
            parameter.grad.div_(parameter.grad.norm(dim=1).max())


def test_owners_run_optimizers_of_one_parameter_alone() -> None:
    """Of a model whose parameters are all alike, too."""
    for shapes in (((6, 4),), ((6, 4), (4,))):
        model = Model(*shapes)
        assert check_steps(Rows(model.pieces, lr=0.1), model.layout, owners=True)
        with pytest.raises(OptimizerMismatchError, match="ByTheNormOfAll looks at more"):
            check_steps(ByTheNormOfAll(model.pieces, lr=0.1), model.layout, owners=True)
        assert not check_steps(torch.optim.AdamW(model.pieces, lr=0.1), model.layout, owners=True)


class Squares(OneByOne):
    """Preconditions each side of a tensor by a square matrix, as Shampoo does.

    Attributes:
        largest: The largest side so far.
    """

    largest = 0

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        update = parameter.grad
        for dim, size in enumerate(parameter.shape):
            Squares.largest = max(Squares.largest, size)
            if size > 1000:
                raise MemoryError("a matrix of so many rows")
            rows = update.movedim(dim, 0).reshape(size, -1)
            update = (rows @ rows.T @ rows).view(update.movedim(dim, 0).shape).movedim(0, dim)
        parameter.grad.copy_(update / (1e-6 + update.norm()))


class DrawsAndScales(OneByOne):
    """Draws a number that it does not need, as some preconditioners nearly do, and scales by a norm."""

    largest: ClassVar = 0

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        torch.rand(())
        DrawsAndScales.largest = max(DrawsAndScales.largest, parameter.numel())
        parameter.grad.div_(parameter.grad.norm() + 1e-6)


def test_random_optimizer_is_refused_over_few_elements() -> None:
    """Its steps over more may take minutes."""
    model = Model((6, 4))
    with pytest.raises(OptimizerMismatchError, match=NOT_ELEMENTWISE):
        check_steps(DrawsAndScales(model.pieces, lr=0.1), model.layout)
    assert 0 < DrawsAndScales.largest <= 12 * 10


class DrawsOnRank1(OneByOne):
    """Draws on one rank alone; what it does with the number is its option."""

    def __init__(self, params: Any, rank: int, *, uses: bool) -> None:
        super().__init__(params, lr=0.1)
        self.rank, self.uses = rank, uses

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        if self.rank == 1:
            number = torch.rand(())
            parameter.grad.mul_(number if self.uses else 1.0)


def differ_in_draws() -> list[bool | str]:
    """What the set-up says of optimizers that draw on one of two ranks: of one that uses the number, and one not."""
    runtime = started()
    outcomes: list[bool | str] = []
    for uses in (True, False):
        model = Model((6, 4))
        try:
            outcomes.append(
                check_steps(DrawsOnRank1(model.pieces, runtime.rank, uses=uses), model.layout, runtime=runtime)
            )
        except OptimizerMismatchError as error:
            outcomes.append(str(error))
    runtime.stop()
    return outcomes


def test_ranks_on_one_of_which_an_optimizer_draws_decide_together() -> None:
    with RankPool() as ranks:
        first, second = ranks.run(2, differ_in_draws, timeout=60)
    assert "another rank has refused it" in first[0]
    assert "draws random numbers in its step" in second[0]
    assert first[1] is second[1] is False


def test_a_trial_makes_no_matrix_of_all_elements() -> None:
    """Whose runs are looked at, an optimizer of square matrices would make one with thousands of rows."""
    model = Model((6, 4), (4,))
    assert check_steps(Squares(model.pieces, lr=0.1), model.layout, owners=True)
    assert 100 < Squares.largest < 200


class KeepsAQueue(OneByOne):
    """Keeps the last gradients where no checkpoint holds them."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        self.state[parameter].setdefault("last", deque(maxlen=3)).append(parameter.grad.clone())


class KeepsForNone(torch.optim.SGD):
    """Keeps state under a name instead of a parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = {"taken": 1}  # type: ignore[index]
        return super().step(closure)


class ByItsLoss(torch.optim.SGD):
    """Makes smaller steps where the loss is small."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * loss * parameter.grad


class Differentiates(torch.optim.SGD):
    """Takes the gradients of gradients."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        torch.autograd.grad([p.grad for p in params], params, [torch.ones_like(p) for p in params])


class Ascends(torch.optim.SGD):
    """Evaluates where gradients lead up, as SAM does, and so can't do without a closure, whatever it says."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure is needed")
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        up = [p.grad / total for p in params]
        for parameter, way in zip(params, up, strict=True):
            parameter += way
        with torch.enable_grad():
            closure()
        for parameter, way in zip(params, up, strict=True):
            parameter -= way
        return super().step()


class DropsAtRandom(OneByOne):
    """Leaves a parameter as it is, now and then."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.grad.mul_(torch.rand(()) > 0.5)


class DecaysByTheMean(OneByOne):
    """Its weight decay, which is little beside its steps, is divided by a norm, as AdamS's is."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        parameter.mul_(1 - 0.01 * group["lr"] / parameter.grad.square().mean().sqrt())


class Estimates(OneByOne):
    """Adds up squares of gradients in its param group, and will use the sum much later, as D-adaptation does."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        group["sum"] = group.get("sum", 0.0) + float(parameter.grad.square().sum())


class KeepsSome(OneByOne):
    """Keeps moments of the elements that are small, of which there may be none."""

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        self.state[parameter]["some"] = parameter.grad[parameter.abs() < 1e-30].clone()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (KeepsAQueue, r"saved and resumed: 'state/a parameter of \(.*\)/last': collections.deque is neither"),
        (KeepsForNone, "it keeps state of no parameter, under 'steps'"),
        (DropsAtRandom, "draws random numbers in its step, and ranks would draw others for their shards"),
        (Estimates, f"Estimates {NOT_ELEMENTWISE}"),
        (ByItsLoss, "scales its steps by the loss that its closure returns, and each rank has the loss of its own"),
        (Differentiates, "Differentiates differentiates gradients once more"),
        (Ascends, f"Ascends {NOT_ELEMENTWISE}"),
    ],
)
@pytest.mark.parametrize("owners", [False, True])
def test_optimizers_that_fail_or_differ_later_are_refused(kind: Any, why: str, owners: bool) -> None:
    """At the first step, at the first checkpoint, or never, silently."""
    model = Model((6, 4))
    with pytest.raises(OptimizerMismatchError, match=why):
        check_steps(kind(model.pieces, lr=0.1), model.layout, owners=owners)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (KeepsSome, r"keeps 'some' of shape \(0,\) .* would hold that of one rank"),  # as many elements as happen to be
        (DecaysByTheMean, NOT_ELEMENTWISE),  # though the norm only scales a small part of a step
    ],
)
def test_optimizers_that_only_an_owner_can_run(kind: Any, why: str) -> None:
    model = Model((6, 4))
    with pytest.raises(OptimizerMismatchError, match=why):
        check_steps(kind(model.pieces, lr=0.1), model.layout)
    assert check_steps(kind(model.pieces, lr=0.1), model.layout, owners=True)


class RowsWithAMemory(Rows):
    """Scales rows by what it keeps of them."""

    keeps: Any = None

    def prepare(self, parameter: Any, group: dict[str, Any]) -> None:
        super().prepare(parameter, group)
        if parameter.ndim > 1:
            kept = self.state[parameter].setdefault("kept", type(self).keeps(parameter.grad))
            parameter.grad.mul_(next(iter(kept.values() if isinstance(kept, dict) else kept)))


def test_small_tensors_of_one_shape_have_names_of_their_own() -> None:
    """As a tensor-parallel model's biases and norms: divided, whole, and frozen ones."""
    specs = [
        ParamSpec(shape=(150,), is_flat=False, requires_grad=requires_grad, placements=placements)
        for requires_grad in (True, False)
        for placements in ((Replicate(),), (Shard(0),), (Shard(0), Shard(0)))
    ]
    drawn = torch.Generator().manual_seed(0)
    small_params = {(0, spec): new_small_param(spec, torch.device("cpu"), as_unsharded, drawn) for spec in specs}
    layout = layout_of_small_params(small_params)
    assert [small.param for small in small_params.values()] == list(layout)
    assert len({parts[0].name for parts in layout.values()}) == len(specs)


class Box:
    """Nothing that a checkpoint can hold."""

    def __init__(self, grad: Tensor) -> None:
        self.pieces = grad.clone()

    def __iter__(self) -> Any:
        return iter([self.pieces])


@pytest.mark.parametrize(
    "keeps", [lambda grad: (grad.clone(), 1.0), lambda grad: [grad.clone()], lambda grad: {"a": grad.clone()}]
)
def test_owners_state_in_containers_is_resumed(keeps: Any) -> None:
    model = Model((6, 4))
    RowsWithAMemory.keeps = staticmethod(keeps)
    assert check_steps(RowsWithAMemory(model.pieces, lr=0.1), model.layout, owners=True)


def test_owners_state_that_no_checkpoint_holds_is_refused() -> None:
    model = Model((6, 4))
    RowsWithAMemory.keeps = Box
    with pytest.raises(
        OptimizerMismatchError, match=r"state could not be saved and resumed: .*Box is neither plain data"
    ):
        check_steps(RowsWithAMemory(model.pieces, lr=0.1), model.layout, owners=True)


class Forgets(torch.optim.SGD):
    """Can't be resumed by anybody."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError("no states here")


@pytest.mark.parametrize("show_whole", [False, True])
def test_optimizer_that_nobody_can_resume_gets_a_warning(show_whole: bool) -> None:
    model = Model((6, 4))
    # Rows first: torch gives Forgets a step() of its own, SGD's with hooks, if no SGD was made before in this process
    made = (Forgets if not show_whole else type("ForgetsRows", (Rows, Forgets), {}))(model.pieces, lr=0.1)
    with pytest.warns(UserWarning, match=r"can't be resumed, sharded or not: .*NotImplementedError: no states here"):
        assert check_steps(made, model.layout, owners=True) is show_whole


class Draws(torch.optim.SGD):
    """Draws random numbers, of which it makes no use."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(3), random.random(), numpy.random.rand()
        return super().step(closure)


def test_a_trial_leaves_the_random_numbers_of_the_user_alone() -> None:
    def drawn() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    model = Model((6, 4))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    want = drawn()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    assert not check_steps(Draws(model.pieces, lr=0.1), model.layout, owners=True)
    assert drawn() == want


def test_a_trial_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            told.set()

    class Waits(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert told.wait(30.0)
            return super().step(closure)

    monkeypatch.setattr(trial, "_SILENT_SECONDS", 0.0)
    listener, model = Listener(), Model((6, 4))
    trial._log.addHandler(listener)
    try:
        check_steps(Waits(model.pieces, lr=0.1), model.layout)
    finally:
        trial._log.removeHandler(listener)
    assert "Waits has been tried over small tensors, to find out its steps over whole parameters" in said[0]


class Ahead(torch.optim.Optimizer):
    """Steps by another optimizer, whose param groups it shares, and has a state of its own, which is empty."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state: Any = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


def test_the_state_of_an_optimizer_inside_is_saved_and_restored() -> None:
    parameter = nn.Parameter(torch.ones(6, 4))
    layout: Layout = {parameter: (Part(name="weight", shape=(6, 4)),)}
    one, other = (Ahead(torch.optim.AdamW([parameter])) for _ in range(2))
    parameter.grad = torch.ones(6, 4)
    one.step()
    load_optimizer_state(other, layout, optimizer_state(one, layout, ProcessGroupRuntime()))
    assert torch.equal(other.inner.state[parameter]["exp_avg"], one.inner.state[parameter]["exp_avg"])
    model = Model((6, 4))
    assert not check_steps(Ahead(torch.optim.AdamW(model.pieces)), model.layout, owners=True)
