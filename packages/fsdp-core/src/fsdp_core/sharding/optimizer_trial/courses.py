"""The courses of a trial: what small tensors become while a copy of an optimizer steps over them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.sharding.observed_communication import ObservedCommunication
from fsdp_core.sharding.optimizer_trial.copies import copied, step_of
from fsdp_core.sharding.optimizer_trial.small_tensors import (
    Key,
    Kind,
    Shown,
    Small,
    as_dtensor,
    as_it_is,
    first_run,
    last_run,
    new_small,
    new_smalls,
    smaller,
)

__all__ = [
    "COARSE",
    "FINE",
    "SLIGHT",
    "STEPS",
    "Course",
    "Ran",
    "alike",
    "course",
    "ends_alike",
    "is_right_in_runs",
    "keeps_alike",
    "moves_without_gradients_of",
    "of_this_rank",
    "own_world",
    "record",
    "step_over_nothing",
]

#: The number of steps, and of values of a parameter that are compared; some optimizers evaluate often in a step.
STEPS = 6
_COMPARED = 7

#: Held by a thread while it keeps torch from compiling a step that runs only once.
_ALONE = threading.Lock()

#: Relative to a step's largest change, where collectives add in another order, or codes of a few bits have other
#: blocks: covers the rounding of optimizers that compute in bf16 internally.
COARSE = 0.05

#: The same where each element is computed alike: covers what a last bit grows to in six steps. Some optimizers look at
#: other elements for their weight decay alone, which is little beside a step.
FINE = 1e-3

#: Relative to a value, for each of the two values that a step is the difference of: fp32 rounds by half of it.
_ROUNDED = 2.0**-22

#: Below that, numbers that an optimizer keeps are taken for zero.
_LEAST = 1e-20

#: A factor that makes gradients as small as those of real models. Weight decay that is divided by them then matters.
SLIGHT = 1e-4

#: By param group and kind, the flattened values of the small tensor at each gradient computation, of shape
#: ``(times, elements)``.
Course = dict[Key, Tensor]


@dataclass(kw_only=True)
class Ran:
    """A copy of an optimizer that has stepped over small tensors.

    Attributes:
        values: What these became.
        optimizer: The copy.
        smalls: The small tensors, as the last step has left them.
        by_closure: Whether it stepped with a closure.
        drew: Whether its steps drew random numbers.
    """

    values: Course
    optimizer: torch.optim.Optimizer
    smalls: dict[Key, Small]
    by_closure: bool
    drew: bool


@contextmanager
def own_world(device: torch.device, *, waits: bool = False, seed: int = 0) -> Iterator[Callable[[], bool]]:
    """A context in which nothing is compiled, and random numbers are drawn from generators that begin alike.

    Args:
        device: The device of the parameters.
        waits: Whether ranks wait for each other in it: such ranks are processes, and need no lock. Ranks that are
            threads share the stance and the generators.
        seed: What the generators begin with.

    Yields:
        Whether anything has been drawn so far.
    """
    numpy = sys.modules.get("numpy")
    on_device = [device] if device.type == "cuda" else []
    eager, forked = torch.compiler.set_stance("force_eager"), torch.random.fork_rng(on_device, device_type="cuda")
    with nullcontext() if waits else _ALONE, eager, forked:
        python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
        torch.default_generator.manual_seed(seed)
        for _ in on_device:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)

        def state() -> list[Any]:
            words = torch.get_rng_state(), *map(torch.cuda.get_rng_state, on_device)
            drawn = [] if numpy is None else numpy.random.get_state()[1:3]
            return [*(one.tolist() for one in words), random.getstate(), *map(bytes, drawn[:1]), *drawn[1:]]

        begun = state()
        try:
            yield lambda: state() != begun
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def course(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, Kind],
    shown: Shown,
    *,
    by_closure: bool,
    only: Key | None = None,
    beside_others: bool = False,
    losses: tuple[float, ...] = (1.0,),
    seed: int = 0,
    scale: float = 1.0,
) -> Ran:
    """Step a copy of an optimizer over the parts of small tensors that ``shown`` returns.

    Args:
        optimizer: The optimizer. It is not changed.
        kinds: What represents its parameters.
        shown: What it gets of a small tensor.
        by_closure: Whether it steps with a closure.
        only: The one small tensor that it steps over; by default, all.
        beside_others: With ``only``, whether one more is in its group, whose gradient is now much larger and now much
            smaller: this one's steps must be the same.
        losses: The losses that closures return, one after the other.
        seed: What random numbers in its steps depend on.
        scale: A factor for all gradients.

    Raises:
        Communicates: A step runs a collective, over others than DTensors.
    """
    generator = torch.Generator().manual_seed(0)
    smalls, stand_ins = new_smalls(optimizer, kinds, shown, generator)
    made = copied(optimizer, stand_ins)
    for index, group in enumerate(made.param_groups if only is not None else ()):
        group["params"][:] = [smalls[only].held] if only is not None and index == only[0] else []
    other: Small | None = None
    if only is not None and beside_others:
        other = new_small(only[1], smalls[only].held.device, shown, generator)
        made.param_groups[only[0]]["params"].append(other.held)
    device = next((small.held.device for small in smalls.values()), torch.device("cpu"))
    by_itself = ObservedCommunication(allowed=shown is as_dtensor)  # ranks would wait for those that have failed
    with own_world(device, waits=shown is as_dtensor, seed=seed) as has_drawn, by_itself:
        values = record(
            made, smalls, by_closure=by_closure, steps=range(STEPS), other=other, losses=losses, scale=scale
        )
        drew = has_drawn()
    stepped = smalls if only is None else {only: smalls[only]}
    return Ran(values=values, optimizer=made, smalls=stepped, by_closure=by_closure, drew=drew)


def record(
    made: torch.optim.Optimizer,
    smalls: Mapping[Key, Small],
    *,
    by_closure: bool,
    steps: range,
    other: Small | None = None,
    losses: tuple[float, ...] = (1.0,),
    scale: float = 1.0,
) -> Course:
    """Let an optimizer step over small tensors, and write down their values. Called inside :func:`own_world`.

    Args:
        made: The optimizer.
        smalls: The small tensors that it holds.
        by_closure: Whether it steps with a closure.
        steps: The steps, by which gradients differ.
        other: Another one that it holds, whose values don't count.
        losses: The losses that closures return, one after the other.
        scale: A factor for all gradients.
    """
    seen: list[list[Tensor]] = []
    step = step_of(made, by_closure=by_closure)

    def evaluate(number: int) -> Tensor:
        if len(seen) <= _COMPARED:
            seen.append([local_tensor(small.held.detach()).reshape(-1).clone() for small in smalls.values()])
        for small in smalls.values():
            if small.held.requires_grad:
                small.set_gradient(number, scale)
        if other is not None and other.held.requires_grad:
            other.set_gradient(number, scale * (1e3 if number % 2 else 1e-3))
        return torch.tensor(losses[number % len(losses)])

    for number in steps:
        evaluate(number)
        step(partial(evaluate, number))
    evaluate(steps.stop)
    return dict(zip(smalls, (torch.stack(values) for values in zip(*seen, strict=True)), strict=True))


def is_right_in_runs(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, Kind],
    *,
    by_closure: bool,
    whole: Ran | None = None,
    tolerance: float = FINE,
) -> tuple[bool, tuple[Ran, Ran]]:
    """Whether steps over runs of elements are those over whole tensors.

    This is looked at over few elements first: an optimizer of whole matrices may make one with a row for each element.

    Args:
        optimizer: The optimizer. It is not changed.
        kinds: What represents its parameters.
        by_closure: Whether it steps with a closure.
        whole: The steps over whole tensors, if they have been taken already.
        tolerance: As for :func:`alike`.

    Returns:
        The answer, and the steps over the runs that have given it.
    """
    few = smaller(kinds)
    for those, stepped, scale in ((few, None, 1.0), (few, None, SLIGHT), (kinds, whole, 1.0)):
        want = stepped or course(optimizer, those, as_it_is, by_closure=by_closure, scale=scale)
        first, last = (
            course(optimizer, those, run, by_closure=by_closure, scale=scale) for run in (first_run, last_run)
        )
        kept = all(keeps_alike(want, one) for one in (first, last))
        if not kept or not alike(want.values, _joined(first.values, last.values), tolerance):
            return False, (first, last)
    return True, (first, last)


def keeps_alike(want: Ran, got: Ran) -> bool:
    """Whether two optimizers keep the same numbers of a small tensor, and in its param group.

    Such a number may matter many steps later, as an estimated learning rate does.

    Args:
        want: The steps over whole tensors.
        got: The steps over parts of them, or over some.
    """
    states = [
        (want.optimizer.state[want.smalls[key].held], got.optimizer.state[small.held])
        for key, small in got.smalls.items()
        if want.smalls[key].held in want.optimizer.state and small.held in got.optimizer.state
    ]
    groups = [(want.optimizer.param_groups[one], got.optimizer.param_groups[one]) for one in {i for i, _ in got.smalls}]
    numbers = [
        (_number(expected[key]), _number(found[key]))
        for expected, found in (*states, *groups)
        for key in expected.keys() & found.keys()
    ]
    return all(
        one is None or other is None or one == other or isclose(one, other, rel_tol=FINE, abs_tol=_LEAST)
        for one, other in numbers
    )


def _number(value: Any) -> float | None:
    """A number that is comparable; ``None`` for other values, and for what has become NaN."""
    if type(value) is Tensor and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isnan(value) else None


def ends_alike(want: Ran, got: Ran) -> bool:
    """Whether all steps together have changed the same elements by the same amounts."""
    for key, small in want.smalls.items():
        expected, found = (local_tensor(one.held.detach()).reshape(-1) for one in (small, got.smalls[key]))
        if expected.numel():
            moved = (expected - want.values[key][0]).abs().amax()
            near = (expected - found).abs() <= COARSE * moved + _ROUNDED * expected.abs().amax()
            if not bool((near | (expected.isnan() & found.isnan())).all()):
                return False
    return True


def step_over_nothing(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, Kind]) -> None:
    """Step a copy of an optimizer whose param groups are empty, as they are on a rank that owns no parameter."""
    smalls, stand_ins = new_smalls(optimizer, kinds, as_it_is, torch.Generator().manual_seed(0))
    made = copied(optimizer, stand_ins)
    for group in made.param_groups:
        group["params"].clear()
    device = next((small.held.device for small in smalls.values()), torch.device("cpu"))
    with own_world(device), ObservedCommunication(allowed=False):
        step_of(made, by_closure=False)(lambda: torch.ones(()))


def moves_without_gradients_of(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, Kind]) -> bool:
    """Whether a step also changes small tensors that have no gradient, as if it were zero."""
    smalls, stand_ins = new_smalls(optimizer, kinds, as_it_is, torch.Generator().manual_seed(0))
    step = step_of(copied(optimizer, stand_ins), by_closure=False)
    held = [small.held for small in smalls.values()]

    def evaluate() -> Tensor:
        return torch.ones(())

    try:
        with own_world(next((one.device for one in held), torch.device("cpu"))):
            for small in smalls.values():
                if small.held.requires_grad:
                    small.set_gradient(0)
            step(evaluate)
            before = [parameter.detach().clone() for parameter in held]
            for parameter in held:
                parameter.grad = None
            step(evaluate)
    except Exception:  # it needs gradients
        return False
    return any(not torch.equal(parameter.detach(), one) for parameter, one in zip(held, before, strict=True))


def _joined(first: Course, last: Course) -> Course:
    """Join two ranks' parts of each small tensor. One may have evaluated more often than the other."""
    return {
        key: torch.cat([a[: len(last[key])], last[key][: len(a)]], 1) if key[1].is_flat else a
        for key, a in first.items()
    }


def of_this_rank(whole: Course) -> Course:
    """This rank's expected part of each small tensor, if it is a DTensor."""
    shown = ((key, as_dtensor(values.new_zeros(key[1].shape), key[1])) for key, values in whole.items())
    return {
        key: torch.stack([local_tensor(as_dtensor(now.view(shard.shape), key[1])).reshape(-1) for now in whole[key]])
        for key, shard in shown
    }


def alike(want: Course, got: Course, tolerance: float) -> bool:
    """Whether each step changed the same elements by the same amounts.

    Args:
        want: What whole tensors became.
        got: The same elements.
        tolerance: How much amounts may differ, relative to the step's largest: :data:`FINE` or :data:`COARSE`.
    """
    for key, values in want.items():
        if values.shape != got[key].shape:
            return False
        expected, found = values.diff(dim=0), got[key].diff(dim=0)
        largest = expected.abs().amax(1, keepdim=True) if expected.numel() else expected
        rounded: Any = _ROUNDED * values.abs().amax() if values.numel() else 0.0
        if not bool(((expected - found).abs() <= tolerance * largest + rounded).all()):
            return False
    return True
