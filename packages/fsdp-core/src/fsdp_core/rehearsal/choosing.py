"""Chooses among rehearsed candidates: what fits, and then costs least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.outside_steps.sharded_modules import size_in_words
from fsdp_core.plugins import registry
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.planning import Outcome

__all__ = ["SPARE", "Choice", "choose", "what_to_do_instead"]

#: How much of a device's memory must be left over by what a plan says, as a part of that: what is not in a plan are
#: the rounding of allocators, and what libraries allocate for themselves.
SPARE = 0.1

#: Costs that differ by less than this part are alike. Then the simpler strategy is taken, which is listed first.
_ALIKE = 0.1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy that was chosen, as plain data, which other ranks take over.

    Attributes:
        strategy: Its name; ``"auto"`` is Lightning's choice for one device.
        options: Its options, as the constructor's keywords.
        ranks: The number of ranks that it was chosen for.
        code: What to write in a script for the same.
        peak_bytes: The bytes at the peak, by the plan.
        reason: Why it was chosen: a sentence.
        assumptions: What was assumed of values, with where.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    code: str = ""
    peak_bytes: int = 0
    reason: str = ""
    assumptions: Sequence[str] = ()


def choose(
    planned: Sequence[tuple[Candidate, Outcome]], memory: int, refused: Mapping[str, str] | None = None
) -> Choice:
    """Choose the candidate that costs least of those that fit.

    Fewer bytes sent cost less; where these are alike, less computation, which recomputed activations repeat. Costs are
    alike that differ by less than a tenth. Of candidates that are alike in both, the first with the fewest options is
    chosen.

    Args:
        planned: Candidates, the simplest first, with what their rehearsals have shown.
        memory: The bytes that a device has.
        refused: What is installed and can't be rehearsed, with why.

    Raises:
        ShardingError: None fits with a tenth of its need to spare, or none could be rehearsed.

    Example:
        >>> def planned(name, peak, sent):
        ...     outcome = Outcome(code=name, strategy=name, ranks=2, peak_bytes=peak, sent_bytes=sent)
        ...     return Candidate(strategy=name, ranks=2), outcome
        >>> plans = [planned("ddp", 9000, 200), planned("sharded", 5000, 310), planned("sharded more", 4000, 300)]
        >>> choose(plans, 10_000).strategy, choose(plans, 9_500).strategy
        ('ddp', 'sharded')
    """
    rehearsed = [plan for plan in planned if plan[1].error is None]
    fitting = [plan for plan in rehearsed if memory - plan[1].needed_bytes >= SPARE * plan[1].needed_bytes]
    if not rehearsed:
        raise ShardingError(
            f"the fit could not be rehearsed, so that nothing can be chosen: {_list_errors(planned)}.\n"
            f"{what_to_do_instead()}"
        )
    left_out = _left_out(planned, refused or {})
    if not fitting:
        _, least = min(rehearsed, key=lambda plan: plan[1].needed_bytes)
        raise ShardingError(
            f"nothing fits {size_in_words(memory)} a device with a tenth to spare. The least is {least.code}, with "
            f"{size_in_words(least.needed_bytes)}{left_out}.\n"
            "Use more devices, a smaller batch with accumulate_grad_batches, or cpu_offload=True; `fsdp plan` shows "
            f"what needs how much. To try the least all the same, write {least.code}."
        )
    cheapest = _alike(fitting, lambda outcome: outcome.sent_bytes)
    cheapest = _alike(cheapest, lambda outcome: outcome.flops)
    candidate, outcome = min(cheapest, key=lambda plan: len(plan[0].options))
    return Choice(
        strategy=candidate.strategy,
        options=dict(candidate.options),
        ranks=candidate.ranks,
        code=_code_with_import(candidate),
        peak_bytes=outcome.peak_bytes,
        reason=_reason(outcome, fitting, planned, memory) + left_out,
        assumptions=[f"{what}{f', at {location}' if location else ''}" for what, location, _ in outcome.assumptions],
    )


def what_to_do_instead() -> str:
    """What users can do about a fit that can't be rehearsed: it may be their error, or the rehearsal's limit."""
    return (
        "If a run would raise this too, mend it there; FSDP_PLAN_TRACEBACK=1 in the environment shows the whole stack. "
        "If only the rehearsal does, whose tensors have no values, write a strategy by its name, which is not "
        f"rehearsed, of {', '.join(['ddp', *registry.strategies()])}."
    )


def _alike(plans: Sequence[tuple[Candidate, Outcome]], cost: Any) -> list[tuple[Candidate, Outcome]]:
    least = min(cost(outcome) for _, outcome in plans)
    return [plan for plan in plans if cost(plan[1]) <= least * (1 + _ALIKE)]


def _reason(
    outcome: Outcome,
    fitting: Sequence[tuple[Candidate, Outcome]],
    planned: Sequence[tuple[Candidate, Outcome]],
    memory: int,
) -> str:
    need = f"it needs {size_in_words(outcome.needed_bytes)} of {size_in_words(memory)} a device"
    if outcome.ranks == 1:
        return need
    reason = (
        f"{need}; {len(fitting)} of {len(planned)} option sets fit with a tenth to spare, and none sends and repeats "
        f"much less than this one, with {size_in_words(outcome.sent_bytes)} in a step"
    )
    whole = next((other for candidate, other in planned if candidate.strategy == "ddp" and other.error is None), None)
    if whole is not None and whole is not outcome and all(other is not whole for _, other in fitting):
        reason += f"; whole parameters on each, by DDP, would need {size_in_words(whole.needed_bytes)}"
    return reason


def _left_out(planned: Sequence[tuple[Candidate, Outcome]], refused: Mapping[str, str]) -> str:
    failed = [plan for plan in planned if plan[1].error is not None]
    errors = [*([_list_errors(failed)] if failed else ()), *(f"{name}: {why}" for name, why in refused.items())]
    return f"; left out: {'; '.join(errors)}" if errors else ""


def _code_with_import(candidate: Candidate) -> str:
    if not candidate.options:
        return candidate.code
    module, _, class_name = str(registry.describe(candidate.strategy).trainer).partition(":")
    return f"strategy={candidate.code}, after `from {module} import {class_name}`"


def _list_errors(planned: Sequence[tuple[Candidate, Outcome]]) -> str:
    by_error: dict[str, list[str]] = {}
    for _, outcome in planned:
        by_error.setdefault(str(outcome.error), []).append(outcome.code)
    return "; ".join(f"{', '.join(codes)}: {error.rstrip('.')}" for error, codes in by_error.items())
