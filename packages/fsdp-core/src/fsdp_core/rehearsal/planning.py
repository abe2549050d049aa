"""Rehearses a caught fit with each candidate, each in a process of its own, and ranks them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_core import devices
from fsdp_core.device_names import REHEARSED
from fsdp_core.errors import ShardingError, first_line
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.collectives import total_sent
from fsdp_core.rehearsal.fabric_loop import CaughtLoop
from fsdp_core.rehearsal.fit import Rehearsal, RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.forks import call_in_fork
from fsdp_core.rehearsal.picture import Curve, curve_of
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.rehearsal.users_code import line_of_error
from fsdp_core.torch_private.fake_tensors import DynamicOutputShapeException, operator_without_fake

__all__ = ["Outcome", "devices_here", "ranked", "rehearse_candidate"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the rehearsal of one candidate has shown, as plain data.

    Attributes:
        code: What to write in the script.
        strategy: The strategy's name.
        ranks: The number of ranks.
        error: Why it can't be rehearsed, or what the run would raise; ``None`` if it went well.
        peak_bytes: The most bytes of tensors that are live at once on this rank, in the second step.
        beside_tensors: What the device needs beside them, in bytes, by what it is; empty for a CPU.
        by_content: These bytes by what they hold, the largest first.
        phase: The phase of the peak.
        module: The unit that computes at the peak, by name; empty outside of units.
        sent_bytes: The bytes that this rank sends in a step.
        calls: Calls of collectives in a step, by name.
        operations: The operations of a step.
        flops: The floating-point operations of its matrix products, convolutions and attention.
        written_bytes: The bytes of all tensors that its operations have allocated.
        parameters: The number of the model's parameters.
        assumptions: What was assumed of values: in words, where, and how often.
        seconds: The CPU time of the rehearsal.
        curve: The memory over the step, if it is to be drawn.
        expected_seconds: The least and the most that a step is expected to take on the devices that are here, if asked.
    """

    code: str
    strategy: str
    ranks: int
    error: str | None = None
    peak_bytes: int = 0
    beside_tensors: Mapping[str, int] = field(default_factory=dict)
    by_content: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""
    sent_bytes: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    operations: int = 0
    flops: int = 0
    written_bytes: int = 0
    parameters: int = 0
    assumptions: Sequence[tuple[str, str, int]] = ()
    seconds: float = 0.0
    curve: Curve | None = None
    expected_seconds: tuple[float, float] | None = None

    @property
    def needed_bytes(self) -> int:
        """The bytes that the device needs."""
        return self.peak_bytes + sum(self.beside_tensors.values())

    def fits(self, memory: int) -> bool:
        """Whether the run is rehearsed, and needs no more than so many bytes."""
        return self.error is None and self.needed_bytes <= memory


def devices_here() -> tuple[int, int]:
    """The number of devices of this machine, and the memory of each in bytes: of the host, if it has no accelerator."""
    accelerators = devices.device_facts()
    if accelerators and accelerators[0]["memory"]:
        return len(accelerators), int(accelerators[0]["memory"])
    return 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ranked(outcomes: Iterable[Outcome], memory: int) -> list[Outcome]:
    """Outcomes from the one that costs least to the one that costs most, those that do not fit after all that do.

    Of those that fit, fewer bytes sent are better, then less computation, which activation checkpointing repeats. Of
    those that do not, less memory is. What can't be rehearsed comes last.

    Args:
        outcomes: What was rehearsed.
        memory: The bytes that a device has.
    """

    def cost(outcome: Outcome) -> tuple[Any, ...]:
        if outcome.error is not None:
            return 2, 0
        if not outcome.fits(memory):
            return 1, outcome.needed_bytes
        return 0, outcome.ranks == 1, outcome.sent_bytes, outcome.flops, outcome.operations

    return sorted(outcomes, key=cost)


def rehearse_candidate(
    fit: CaughtFit | CaughtLoop, candidate: Candidate, rank: int = 0, *, draws: bool = False, device: str = REHEARSED[0]
) -> Outcome:
    """Rehearse a fit with a strategy, in a process that is forked for it.

    Args:
        fit: The fit, as the script has asked for it; or its loop under Fabric.
        candidate: The strategy.
        rank: The rank that is played.
        draws: Whether the memory over the step is to be drawn.
        device: The kind of device, of ``device_names.REHEARSED``.
    """
    facts: dict[str, Any] = {"code": candidate.code, "strategy": candidate.strategy, "ranks": candidate.ranks}
    try:
        if isinstance(fit, CaughtLoop):
            if device != "cpu":
                raise ShardingError(f"a loop under Fabric is planned for the CPU alone, not for {device}")
            return fit.rehearse(
                candidate,
                rank,
                summarize=lambda rehearsal: _outcome(facts, rehearsal, draws),
                explain=lambda error: Outcome(**facts, error=_explain(error)),
            )
        return call_in_fork(lambda: _rehearse(fit, candidate, rank, draws, device))
    except ShardingError as error:
        return Outcome(**facts, error=first_line(error))


def _rehearse(fit: CaughtFit, candidate: Candidate, rank: int, draws: bool, device: str) -> Outcome:
    facts: dict[str, Any] = {"code": candidate.code, "strategy": candidate.strategy, "ranks": candidate.ranks}
    try:
        rehearsal = rehearse_fit(
            RehearsedRun(
                build=lambda: fit.module,
                batch=fit.batch,
                batches=fit.batches,
                loader=fit.train_loader,
                datamodule=fit.datamodule,
                trainer_arguments={**fit.trainer_arguments, "callbacks": fit.callbacks},
                strategy=candidate.build(),
                ranks=candidate.ranks,
                rank=rank,
                precision=fit.trainer_keywords.get("precision"),
                loggers=fit.loggers,
                device=device,
            )
        )
    except Exception as error:
        if os.environ.get("FSDP_PLAN_TRACEBACK"):
            traceback.print_exc()
        return Outcome(**facts, error=_explain(error))
    return _outcome(facts, rehearsal, draws)


def _explain(error: BaseException) -> str:
    """What an error says, and the user's line that has raised it."""
    if isinstance(error, DynamicOutputShapeException):
        return f"{error.func}, of which the shape of the result depends on values{line_of_error(error)}"
    if isinstance(error, ShardingError):
        return first_line(error).removesuffix(".")
    operator = operator_without_fake(error)
    if operator is None:
        return f"{type(error).__name__}: {first_line(error)}{line_of_error(error)}"
    return (
        f"the operator {operator}, which can't compute shapes without values{line_of_error(error)}. Write what it "
        f'returns: @torch.library.register_fake("{operator}") on a function of the same arguments that returns such as '
        "torch.empty_like(x)"
    )


def _outcome(facts: Mapping[str, Any], rehearsal: Rehearsal, draws: bool) -> Outcome:
    peak = rehearsal.step.peak("cpu")
    totals = total_sent(rehearsal.step.collectives)
    return Outcome(
        **facts,
        peak_bytes=peak.nbytes,
        beside_tensors=rehearsal.beside_tensors,
        by_content={str(content): nbytes for content, nbytes in peak.by_content.items()},
        phase=peak.phase,
        module=peak.module,
        sent_bytes=sum(sent for _, sent in totals.values()),
        calls={name: calls for name, (calls, _) in totals.items()},
        operations=rehearsal.step.operations,
        flops=rehearsal.step.flops,
        written_bytes=sum(max(0, change.delta) for change in rehearsal.step.changes),
        parameters=rehearsal.numel,
        assumptions=[(a.what, a.location, times) for a, times in rehearsal.assumptions.items()],
        seconds=rehearsal.seconds,
        curve=curve_of(rehearsal.step, "cpu") if draws else None,
    )
