"""Three steps of a module: what is recorded of them, and how two such runs are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["STEPS", "Comparison", "Difference", "TrainedRun", "TrainedStep", "compare_runs"]

#: Optimizer steps of a proof. The third is the first that reads optimizer state, and buffers, which a second one wrote.
STEPS = 3

#: By the coarsest dtype that a step computes in: how much two right gradients may differ, relative to the largest
#: element of the parameter's own. fp64 keeps 16 digits; orders of addition were seen to cost three. A module that casts
#: to fp32 inside keeps 7.
TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4}

#: A gradient that is smaller than this share of the largest one is compared as if it was so large: some are zero by
#: mathematics, such as that of a key's bias, and are nothing but rounding.
FLOOR = 1e-3

#: How much more two right runs may differ than the same run does whose weights are changed in the 13th digit.
SENSITIVITY_FACTOR = 10.0

#: If a change of the 13th digit changes a gradient by as much of itself, nothing can be told by comparing it.
UNSTABLE = 1e-3

#: Elements of a weight whose gradient is less than this share of the largest are not compared: what Adam makes of a
#: gradient is its sign, even if that is rounding's.
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """An optimizer step.

    Attributes:
        gradients: By parameter name, before they are clipped. Of real ranks with manual optimization there are none.
        weights: By parameter name, after the step.
        loss: The loss: the mean over the micro-batches of this process; ``None`` with manual optimization.
        settings: The numbers of each parameter group that the optimizer steps with, such as ``lr``.
        steps_gradients: Whether the optimizer has a parameter that has a gradient.
        unmoved: The parameters that are as they were before the step.
    """

    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    loss: float | None = None
    settings: Sequence[Mapping[str, float]] = ()
    steps_gradients: bool = True
    unmoved: Sequence[str] = ()


@dataclass(kw_only=True)
class TrainedRun:
    """Three optimizer steps, and what was seen in them.

    Attributes:
        steps: The steps.
        random: Where the first step draws random numbers; empty if it draws none.
        coarsest: The least exact dtype that the first step computes in.
        communicates: Whether a step asks its strategy to communicate.
        buffers: Buffers that differ between the ranks that were played, by name, and in which step they first do.
        rank_gradients: In each step, the gradients of each rank that was played.
        outputs: The first output of each submodule in the first step, in the order of calls.
        states: Before each step, the buffers and attributes of each rank that was played: of the module, if none was.
    """

    steps: list[TrainedStep] = field(default_factory=list)
    random: str = ""
    coarsest: torch.dtype = torch.float64
    communicates: bool = False
    buffers: dict[str, int] = field(default_factory=dict)
    rank_gradients: list[list[dict[str, Tensor]]] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    states: list[list[dict[str, Any]]] = field(default_factory=list)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """A run from what ``dataclasses.asdict`` has made of it.

        Args:
            data: The plain data.
        """
        return cls(**{**data, "steps": [TrainedStep(**step) for step in data["steps"]]})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        step: The optimizer step, from 0.
        of: ``"gradient"`` or ``"weight"``.
        parameter: The first parameter that differs in it, in the module's order.
        size: By how much, relative to the largest element.
        count: How many parameters differ in it.
        total: How many there are.
    """

    step: int
    of: str
    parameter: str
    size: float
    count: int
    total: int

    @property
    def words(self) -> str:
        """The difference in words."""
        more = f", and {self.count - 1} more of {self.total}" if self.count > 1 else ""
        return f"{self.of} of {self.parameter} in step {self.step + 1} by {self.size:.1e} of it{more}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two runs differ.

    Attributes:
        difference: The first difference; ``None`` if there is none.
        worst: The largest difference of gradients, relative to the largest element of each.
        unclear: Why what was compared can't tell; empty if it can.
    """

    difference: Difference | None = None
    worst: float = 0.0
    unclear: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the runs are the same, and that can be told."""
        return self.difference is None and not self.unclear


def compare_runs(
    expected: TrainedRun, actual: TrainedRun, perturbed: Sequence[tuple[TrainedRun, TrainedRun]] = ()
) -> Comparison:
    """Compare two runs that should be the same but for the order of additions: gradients first, then weights.

    Args:
        expected: The run that is right.
        actual: The other one.
        perturbed: Runs, each with the same run whose weights were changed in the 13th digit: what that changes,
            rounding may change too.
    """
    coarsest = min((expected.coarsest, actual.coarsest), key=lambda dtype: -torch.finfo(dtype).eps)
    tolerance = TOLERANCE.get(coarsest, TOLERANCE[torch.float64])
    worst = 0.0
    for step, (first, second) in enumerate(zip(expected.steps, actual.steps, strict=False)):
        missing = [name for name in first.weights if name not in second.weights]
        if missing:
            return Comparison(unclear=f"the weights of {missing[0]} can't be read from the ranks")
        sensitivities = _sensitivities(perturbed, step)
        infinite = [name for name, value in first.gradients.items() if not value.isfinite().all()]
        if infinite:
            return Comparison(unclear=f"the gradient of {infinite[0]} is not finite in step {step + 1}")
        largest = max((_largest(value) for value in first.gradients.values()), default=0.0)
        differing: list[tuple[str, float]] = []
        differences = _differences(first.gradients, second.gradients) if second.gradients else ()
        for name, difference, scale in differences:
            sensitivity = sensitivities.get(name, 0.0)
            allowed = tolerance * max(scale, FLOOR * largest) + SENSITIVITY_FACTOR * sensitivity
            if scale > FLOOR * largest:
                worst = max(worst, difference / scale)
                if sensitivity > UNSTABLE * scale:
                    changed = f"the gradient of {name} changes by {sensitivity / scale:.0e} of it"
                    return Comparison(worst=worst, unclear=f"{changed} if weights change in their 13th digit")
            if not difference <= allowed:  # a NaN differs
                differing.append((name, difference / max(scale, FLOOR * largest)))
        if not differing:
            of = "weight"
            for name, weight in first.weights.items():
                size = _difference_of_weights(expected, name, weight, second.weights[name], step, largest)
                if not size <= tolerance + SENSITIVITY_FACTOR * sensitivities.get("weight " + name, 0.0):
                    differing.append((name, size))
        else:
            of = "gradient"
        if differing:
            name, size = differing[0]
            difference_found = Difference(
                step=step, of=of, parameter=name, size=size, count=len(differing), total=len(first.weights)
            )
            if coarsest not in TOLERANCE:
                reason = f"steps compute in {str(coarsest).removeprefix('torch.')}, in which orders of addition differ"
                return Comparison(worst=worst, unclear=f"{reason} ({difference_found.words})")
            return Comparison(difference=difference_found, worst=worst)
    return Comparison(worst=worst)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """Names, largest differences and largest elements. What one side does not have is zero."""
    for name in dict.fromkeys((*first, *second)):
        value, other = first.get(name), second.get(name)
        if value is None or other is None:
            present = value if value is not None else other
            assert present is not None
            yield name, _largest(present), 0.0 if value is None else _largest(present)
        elif value.shape != other.shape:
            yield name, float("inf"), _largest(value)
        else:
            yield name, _largest(value - other), _largest(value)


def _sensitivities(perturbed: Sequence[tuple[TrainedRun, TrainedRun]], step: int) -> dict[str, float]:
    """How much gradients and weights of a step change at most if weights do in their 13th digit, by name."""
    sensitivities: dict[str, float] = {}

    def note(name: str, change: float) -> None:
        sensitivities[name] = max(change, sensitivities.get(name, 0.0))

    for run, changed_run in perturbed:
        if min(len(run.steps), len(changed_run.steps)) <= step:
            continue
        before, after = run.steps[step], changed_run.steps[step]
        for name, difference, _ in _differences(before.gradients, after.gradients):
            note(name, difference)
        for name, difference, scale in _differences(before.weights, after.weights):
            note("weight " + name, difference / scale if scale else 0.0)
    return sensitivities


def _difference_of_weights(
    expected: TrainedRun, name: str, weight: Tensor, other: Tensor, step: int, largest: float
) -> float:
    """The largest difference of elements whose gradients are more than rounding, relative to the largest element."""
    if weight.shape != other.shape:
        return float("inf")
    difference = (weight - other).abs()
    for earlier in expected.steps[: step + 1]:
        gradient = earlier.gradients.get(name)
        if gradient is not None:
            is_rounding = (gradient != 0) & (gradient.abs() < NEGLIGIBLE * largest)
            difference = difference.masked_fill(is_rounding, 0.0)
    scale = _largest(weight)
    return _largest(difference) / scale if scale else _largest(difference)
