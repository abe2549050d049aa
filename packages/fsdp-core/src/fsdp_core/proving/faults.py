"""Why a strategy does not train as it should: known faults of backends, by what they made of gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fsdp_core.proving.causes import shares_of_ranks
from fsdp_core.proving.module_state import is_same_value
from fsdp_core.proving.runs import Difference, TrainedRun
from fsdp_core.rehearsal.forks import Failed

__all__ = ["FAULTS", "Fault", "FaultName", "find_fault"]

FaultName: TypeAlias = Literal[
    "unreduced", "shares", "rounding", "stale", "elements", "settings", "left-out", "clipping", "optimizer", "backend"
]

#: By name, what it means; the names are those that the command accepts.
FAULTS: dict[FaultName, str] = {
    "unreduced": "each rank keeps its own gradient, which nothing averages",
    "shares": "ranks do not count the same in what is averaged",
    "rounding": "gradients are rounded to a dtype that the module does not compute in",
    "stale": "the module computes with weights from before the optimizer's step: gathered parameters are kept over it",
    "elements": "only the last elements differ, as if what does not divide by the ranks was left out",
    "settings": "the optimizer steps with other settings",
    "left-out": "the optimizer does not step these parameters",
    "clipping": "gradients are clipped by another norm: without gradient_clip_val the weights are the same",
    "optimizer": "gradients are the same, and so was the step before: the optimizer loses what it keeps between steps",
    "backend": "none of the known faults",
}

#: How much a share may differ from the right one.
_SHARE_TOLERANCE = 1e-6

#: How near the ranks' average a gradient is that was rounded to a dtype: so many times its rounding.
_ROUNDINGS = 16.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a strategy does not train as it should.

    Attributes:
        name: Which of :data:`FAULTS`.
        words: What was seen.
        remedy: What to write instead, if the user can.
    """

    name: FaultName
    words: str
    remedy: str = ""


def find_fault(
    expected: TrainedRun,
    runs: Sequence[TrainedRun],
    rank: int,
    difference: Difference,
    *,
    accumulate: int,
    detail: Callable[[], TrainedRun | Failed],
    train_with_old_weights: Callable[[], TrainedRun | Failed],
    agrees_without_clipping: Callable[[], bool],
) -> Fault:
    """Find what a strategy has made of gradients or weights.

    Args:
        expected: The run that is right.
        runs: The run as each rank has seen it.
        rank: The rank that differs first.
        difference: How it does.
        accumulate: Micro-batches of a rank in a step.
        detail: Trains the ranks in turn with details.
        train_with_old_weights: Trains the ranks in turn, with weights that are set back after each step.
        agrees_without_clipping: Whether the strategy trains as it should if nothing is clipped.
    """
    step, name, run = difference.step, difference.parameter, runs[rank]
    if difference.of == "weight":
        return _fault_of_weights(expected, run, difference, agrees_without_clipping)
    right = expected.steps[step].gradients.get(name)
    gradient = run.steps[step].gradients.get(name)
    if right is None or gradient is None:
        has = "one, and should have none" if right is None else "none"
        return Fault(name="backend", words=f"{FAULTS['backend']}: the parameter has {has}")
    elements = _elements_at_the_end(right, gradient)
    if elements:
        return Fault(name="elements", words=f"{FAULTS['elements']}: {elements}")
    rounding = _rounding(right, gradient)
    if rounding is not None:
        return Fault(
            name="rounding",
            words=f"{FAULTS['rounding']}: to {str(rounding).removeprefix('torch.')}, as in a reduction in it",
            remedy="If the strategy is to use mixed precision, that is what you have asked for: --accept rounding.",
        )
    detailed = detail()
    if isinstance(detailed, Failed):
        return Fault(name="backend", words=f"{FAULTS['backend']}, and ranks can't be played in turn: {detailed.words}")
    enough = right.numel() > 4 * len(detailed.rank_gradients[step])
    shares = [shares_of_ranks(each, detailed, step, name if enough else None) for each in runs]
    own = shares[rank]
    if own is not None and any(abs(share - 1 / len(own)) > _SHARE_TOLERANCE for share in own):
        return _fault_of_shares(shares, rank, accumulate)
    if step > 0 and _has_gradient_of(train_with_old_weights(), step, name, gradient):
        return Fault(name="stale", words=FAULTS["stale"])
    what = "it is no weighted sum of the ranks' gradients" if own is None else "it is their average in other digits"
    return Fault(name="backend", words=what)


def _fault_of_shares(shares: Sequence[list[float] | None], rank: int, accumulate: int) -> Fault:
    """The fault by the shares of each rank's micro-batches: all ranks' first ones come first."""
    ranks = len(shares)
    own = shares[rank]
    assert own is not None
    size = len(own)

    def keeps_own(of_rank: int) -> bool:
        of_run = shares[of_rank]
        return of_run is not None and all(
            abs(share - (of_rank == number % ranks) * ranks / size) < _SHARE_TOLERANCE
            for number, share in enumerate(of_run)
        )

    if all(map(keeps_own, range(ranks))):
        return Fault(name="unreduced", words=FAULTS["unreduced"])

    def listing(numbers: Sequence[float]) -> str:
        return ", ".join(f"{round(share, 6) + 0.0:.3g}" for share in numbers)

    if accumulate == 1:
        shown = f"ranks have shares of {listing(own)} in it"
    else:
        of_ranks = [f"of rank {number} {listing(own[number::ranks])}" for number in range(ranks)]
        shown = f"micro-batches have shares in it, {' and '.join(of_ranks)}"
    return Fault(name="shares", words=f"{FAULTS['shares']}: {shown}, and should have {1 / size:.3g} each")


def _fault_of_weights(
    expected: TrainedRun, run: TrainedRun, difference: Difference, agrees_without_clipping: Callable[[], bool]
) -> Fault:
    step, name = difference.step, difference.parameter
    trained = run.steps[step]
    if name in trained.unmoved and name not in expected.steps[step].unmoved:
        others_move = len(trained.unmoved) < len(trained.weights)
        if trained.steps_gradients and not others_move:
            return Fault(name="stale", words=FAULTS["stale"])
        why = "" if others_move else ": it has others than those that have gradients"
        return Fault(name="left-out", words=f"{FAULTS['left-out']}{why}")
    for number, (group, other) in enumerate(zip(expected.steps[step].settings, trained.settings, strict=False)):
        for setting, value in group.items():
            if setting in other and not is_same_value(value, other[setting]):
                words = f"{setting} of parameter group {number} is {other[setting]:.6g}, and should be {value:.6g}"
                return Fault(name="settings", words=f"{FAULTS['settings']}: {words}")
    elements = _elements_at_the_end(expected.steps[step].weights[name], trained.weights[name])
    if elements:
        return Fault(
            name="elements", words=f"gradients are the same, and of the weights {FAULTS['elements']}: {elements}"
        )
    if agrees_without_clipping():
        return Fault(name="clipping", words=FAULTS["clipping"])
    if step > 0:
        return Fault(name="optimizer", words=FAULTS["optimizer"])
    return Fault(name="backend", words="gradients are the same, so it is the optimizer's step")


def _elements_at_the_end(expected: Tensor, actual: Tensor) -> str:
    """Which elements differ, in words, if they are a few at the end; else nothing."""
    if expected.shape != actual.shape:
        return ""
    differs = ~torch.isclose(expected, actual, rtol=1e-6, atol=1e-12).reshape(-1)
    count = int(differs.sum())
    if 0 < count < len(differs) / 2 and bool(differs[-count:].all()):
        return f"the last {count} of {len(differs)}"
    return ""


def _rounding(expected: Tensor, actual: Tensor) -> torch.dtype | None:
    """The dtype to which a gradient was rounded, that is else the same."""
    if expected.shape != actual.shape:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = actual.to(dtype).to(actual.dtype)
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((expected - actual).abs().max()) if expected.numel() else 0.0
        is_near = error <= _ROUNDINGS * torch.finfo(dtype).eps * largest
        if torch.finfo(dtype).eps > torch.finfo(actual.dtype).eps and is_near and torch.equal(rounded, actual):
            return dtype
    return None


def _has_gradient_of(run: TrainedRun | Failed, step: int, name: str, gradient: Tensor) -> bool:
    if isinstance(run, Failed):
        return False
    other = run.steps[step].gradients.get(name)
    return other is not None and torch.allclose(gradient, other, rtol=1e-6)
