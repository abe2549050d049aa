"""One run of a trial: a copy of an optimizer steps over small parameters; and how two runs are compared."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.sharding.optimizers.copying import copy_optimizer
from fsdp_core.sharding.optimizers.observed_communication import ObservedCommunication
from fsdp_core.sharding.optimizers.small_params import (
    Key,
    SmallParam,
    Specs,
    View,
    as_dtensor,
    new_small_param,
    new_small_params,
)
from fsdp_core.state.random_state import random_state, set_random_state
from fsdp_core.torch_private.optimizer_steps import plain_tensors_replicated

__all__ = [
    "COARSE",
    "FINE",
    "SLIGHT",
    "STEPS",
    "TrialRun",
    "Values",
    "allclose",
    "have_close_ends",
    "join_shards",
    "keeps_same_numbers",
    "run_steps",
    "shard_values",
]

#: The number of steps of a run.
STEPS = 6

#: The values of a parameter are kept at the first so many gradient computations, besides the very first: some
#: optimizers compute gradients several times in a step.
_MAX_COMPARED = 7

#: How much values may differ, relative to a step's largest change, where collectives add in another order, or codes of
#: a few bits have other blocks: covers the rounding of optimizers that compute in bf16 internally.
COARSE = 0.05

#: The same where each element is computed in the same way: covers what a last bit grows to in six steps. Some
#: optimizers look at other elements for their weight decay alone, which is little beside a step.
FINE = 1e-3

#: How much a change may differ, relative to the values: it is the difference of two, each of which fp32 rounds by half
#: of this at most.
_ROUNDING = 2.0**-22

#: A number that an optimizer keeps is taken for zero if it is smaller.
_LEAST = 1e-20

#: A factor that makes gradients as small as those of real models. Weight decay that is divided by them then matters.
SLIGHT = 1e-4

#: Locked while a thread keeps torch from compiling steps, each of which runs only once: that is set for all threads.
_one_trial_at_a_time = threading.Lock()

#: The flattened values of each small parameter at each gradient computation, of shape ``(times, elements)``.
Values = dict[Key, Tensor]


@dataclass(kw_only=True)
class TrialRun:
    """A copy of an optimizer that has stepped over small parameters.

    Attributes:
        optimizer: The copy.
        small_params: The small parameters, as the last step has left them.
        values: What these were at each gradient computation.
        by_closure: Whether it stepped with a closure.
        drew_random_numbers: Whether its steps drew_random_numbers random numbers.
    """

    optimizer: torch.optim.Optimizer
    small_params: dict[Key, SmallParam]
    values: Values
    by_closure: bool
    drew_random_numbers: bool


def run_steps(
    optimizer: torch.optim.Optimizer,
    specs: Specs,
    view: View,
    *,
    by_closure: bool = False,
    steps: range = range(STEPS),
    steps_with_gradients: int = sys.maxsize,
    only: Collection[Key] | None = None,
    has_neighbour: bool = False,
    losses: tuple[float, ...] = (1.0,),
    seed: int = 0,
    scale: float = 1.0,
    before_step: Callable[[], None] = lambda: None,
    start: Callable[[torch.optim.Optimizer, dict[Key, SmallParam]], None] = lambda copy, small_params: None,
) -> TrialRun:
    """Let a copy of an optimizer step over small parameters.

    Args:
        optimizer: The optimizer. It is not changed.
        specs: The specs of its parameters.
        view: Returns the part of a small parameter that the copy gets. All ranks must call this if it is a DTensor.
        by_closure: Whether it steps with a closure.
        steps: The steps, by which gradients differ.
        steps_with_gradients: The number of steps after which parameters have no gradients.
        only: The small parameters that the copy's groups hold, perhaps none; by default, all.
        has_neighbour: Whether each of ``only`` has a second parameter in its group, with a gradient that is much larger
            in every other step and much smaller in the others.
        losses: The losses that closures return, one after the other.
        seed: The seed of the random numbers that the steps draw.
        scale: A factor for all gradients.
        before_step: Called before each step.
        start: Called with the copy and its small parameters, before the first step.

    Raises:
        Communicates: A step runs a collective, over others than DTensors.
    """
    generator = torch.Generator().manual_seed(0)
    small_params, replacements = new_small_params(optimizer, specs, view, generator)
    device = next((small.param.device for small in small_params.values()), torch.device("cpu"))
    duplicate = copy_optimizer(optimizer, replacements)
    neighbours: list[SmallParam] = []
    if only is not None:
        small_params = {key: small_params[key] for key in only}
        neighbours = [new_small_param(spec, device, view, generator) for _, spec in only if has_neighbour]
        for index, group in enumerate(duplicate.param_groups):
            group["params"][:] = [small.param for key, small in small_params.items() if key[0] == index]
        for (index, _), neighbour in zip(only, neighbours, strict=False):
            duplicate.param_groups[index]["params"].append(neighbour.param)
    start(duplicate, small_params)
    history: list[list[Tensor]] = []

    def evaluate(number: int) -> Tensor:
        if len(history) <= _MAX_COMPARED:
            history.append([local_tensor(small.param.detach()).reshape(-1).clone() for small in small_params.values()])
        for small in small_params.values():
            small.set_gradient(number, scale)
        for neighbour in neighbours:
            neighbour.set_gradient(number, scale * (1e3 if number % 2 else 1e-3))
        if number >= steps_with_gradients:
            for small in small_params.values():
                small.param.grad = None
        return torch.tensor(losses[number % len(losses)])

    is_dtensor = view is as_dtensor
    # Ranks of DTensors are processes, and wait for each other in their steps. Others may be threads, which share
    # torch's stance and generators; and a collective of theirs would wait for ranks that have failed.
    with (
        nullcontext() if is_dtensor else _one_trial_at_a_time,
        torch.compiler.set_stance("force_eager"),
        _seeded(device, seed) as has_drawn,
        ObservedCommunication(allowed=is_dtensor),
    ):
        for number in steps:
            before_step()
            evaluate(number)
            with plain_tensors_replicated(duplicate) as as_outside:
                duplicate.step(as_outside(partial(evaluate, number))) if by_closure else duplicate.step()
        evaluate(steps.stop)
        drew_random_numbers = has_drawn()
    values = dict(zip(small_params, map(torch.stack, zip(*history, strict=True)), strict=True))
    return TrialRun(
        optimizer=duplicate,
        small_params=small_params,
        values=values,
        by_closure=by_closure,
        drew_random_numbers=drew_random_numbers,
    )


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[Callable[[], bool]]:
    """A context in which all generators begin with a seed. Yields a function that says whether any was drawn from."""
    runtime = ProcessGroupRuntime()
    numpy = sys.modules.get("numpy")
    runtime.device = device

    def seed_all() -> None:
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)

    def draw_from_each() -> list[float]:
        numbers = [float(torch.rand(())), float(torch.rand((), device=device)), random.random()]
        return numbers if numpy is None else [*numbers, float(numpy.random.random())]

    state = random_state(runtime)
    try:
        seed_all()
        first_numbers = draw_from_each()
        seed_all()
        yield lambda: draw_from_each() != first_numbers
    finally:
        set_random_state(state, runtime)


def allclose(expected_values: Values, values: Values, tolerance: float) -> bool:
    """Whether each step has changed the same elements by the same amounts.

    Args:
        expected_values: What one process has.
        values: The same elements. There may be more small parameters.
        tolerance: How much amounts may differ, relative to the step's largest: :data:`FINE` or :data:`COARSE`.
    """
    for key, expected in expected_values.items():
        if expected.shape != values[key].shape:
            return False
        if expected.numel():
            changes = expected.diff(dim=0)
            allowed = tolerance * changes.abs().amax(1, keepdim=True) + _ROUNDING * expected.abs().amax()
            if not bool(((changes - values[key].diff(dim=0)).abs() <= allowed).all()):
                return False
    return True


def have_close_ends(expected: TrialRun, run: TrialRun) -> bool:
    """Whether all steps of two runs together have changed the same elements by the same amounts."""
    for key, values in expected.values.items():
        if values.numel():
            expected_end = local_tensor(expected.small_params[key].param.detach()).reshape(-1)
            end = local_tensor(run.small_params[key].param.detach()).reshape(-1)
            allowed = COARSE * (expected_end - values[0]).abs().amax() + _ROUNDING * expected_end.abs().amax()
            is_close = (expected_end - end).abs() <= allowed
            if not bool((is_close | (expected_end.isnan() & end.isnan())).all()):
                return False
    return True


def keeps_same_numbers(expected: TrialRun, run: TrialRun) -> bool:
    """Whether two optimizers keep the same numbers for each small parameter of the second, and in its param group.

    Such a number may matter many steps later, as an estimated learning rate does.
    """
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for key, small in run.small_params.items():
        expected_param = expected.small_params[key].param
        if expected_param in expected.optimizer.state and small.param in run.optimizer.state:
            pairs.append((expected.optimizer.state[expected_param], run.optimizer.state[small.param]))
        pairs.append((expected.optimizer.param_groups[key[0]], run.optimizer.param_groups[key[0]]))
    for first, second in pairs:
        for name in first.keys() & second.keys():
            a, b = _as_number(first[name]), _as_number(second[name])
            if a is not None and b is not None and a != b and not isclose(a, b, rel_tol=FINE, abs_tol=_LEAST):
                return False
    return True


def _as_number(value: Any) -> float | None:
    """A number that is comparable; ``None`` for other values, and for what has become NaN."""
    if type(value) is Tensor and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isnan(value) else None


def join_shards(first: Values, last: Values) -> Values:
    """Join two ranks' shards of each small parameter. One may have evaluated more often than the other."""
    return {
        key: torch.cat([a[: len(last[key])], last[key][: len(a)]], 1) if key[1].is_flat else a
        for key, a in first.items()
    }


def shard_values(values: Values) -> Values:
    """What this rank has of each small parameter's values, if it is a DTensor."""
    return {
        key: torch.stack([local_tensor(as_dtensor(v.view(key[1].shape), key[1])).reshape(-1) for v in times])
        for key, times in values.items()
    }
