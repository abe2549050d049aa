"""Rehearses a caught fit with each candidate, each in a process of its own, and ranks them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from fsdp_core import devices
from fsdp_core.device_names import REHEARSED
from fsdp_core.errors import ShardingError, first_line
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.collectives import total_sent
from fsdp_core.rehearsal.fit import Rehearsal, RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.picture import Curve, curve_of
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.rehearsal.users_code import line_of_error
from fsdp_core.torch_private.fake_tensors import DynamicOutputShapeException, operator_without_fake

__all__ = ["Outcome", "call_in_fork", "devices_here", "ranked", "rehearse_candidate"]

T = TypeVar("T")


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
        parameters: The number of the model's parameters.
        assumptions: What was assumed of values: in words, where, and how often.
        seconds: The CPU time of the rehearsal.
        curve: The memory over the step, if it is to be drawn.
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
    parameters: int = 0
    assumptions: Sequence[tuple[str, str, int]] = ()
    seconds: float = 0.0
    curve: Curve | None = None

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

    Of those that fit, fewer bytes sent are better, then fewer operations, which activation checkpointing repeats. Of
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
        return 0, outcome.ranks == 1, outcome.sent_bytes, outcome.operations

    return sorted(outcomes, key=cost)


def rehearse_candidate(
    fit: CaughtFit, candidate: Candidate, rank: int = 0, *, draws: bool = False, device: str = REHEARSED[0]
) -> Outcome:
    """Rehearse a fit with a strategy, in a process that is forked for it.

    Args:
        fit: The fit, as the script has asked for it.
        candidate: The strategy.
        rank: The rank that is played.
        draws: Whether the memory over the step is to be drawn.
        device: The kind of device, of ``device_names.REHEARSED``.
    """
    try:
        return call_in_fork(lambda: _rehearse(fit, candidate, rank, draws, device))
    except ShardingError as error:
        return Outcome(code=candidate.code, strategy=candidate.strategy, ranks=candidate.ranks, error=first_line(error))


def _rehearse(fit: CaughtFit, candidate: Candidate, rank: int, draws: bool, device: str) -> Outcome:
    facts: dict[str, Any] = {"code": candidate.code, "strategy": candidate.strategy, "ranks": candidate.ranks}
    try:
        rehearsal = rehearse_fit(
            RehearsedRun(
                build=lambda: fit.module,
                batch=fit.batch,
                batches=fit.batches,
                trainer_arguments={**fit.trainer_arguments, "callbacks": fit.callbacks},
                strategy=candidate.build(),
                ranks=candidate.ranks,
                rank=rank,
                precision=fit.trainer_keywords.get("precision"),
                device=device,
            )
        )
    except Exception as error:
        if os.environ.get("FSDP_PLAN_TRACEBACK"):
            traceback.print_exc()
        return Outcome(**facts, error=_explain(error))
    return replace(_outcome(facts, rehearsal), curve=curve_of(rehearsal.step, "cpu") if draws else None)


def _explain(error: BaseException) -> str:
    """What an error says, and the user's line that has raised it."""
    if isinstance(error, DynamicOutputShapeException):
        return f"{error.func}, of which the shape of the result depends on values{line_of_error(error)}"
    operator = operator_without_fake(error)
    if operator is None:
        return f"{type(error).__name__}: {first_line(error)}{line_of_error(error)}"
    return (
        f"the operator {operator}, which can't compute shapes without values{line_of_error(error)}. Write what it "
        f'returns: @torch.library.register_fake("{operator}") on a function of the same arguments that returns such as '
        "torch.empty_like(x)"
    )


def _outcome(facts: Mapping[str, Any], rehearsal: Rehearsal) -> Outcome:
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
        parameters=rehearsal.numel,
        assumptions=[(a.what, a.location, times) for a, times in rehearsal.assumptions.items()],
        seconds=rehearsal.seconds,
    )


def call_in_fork(call: Callable[[], T]) -> T:
    """Call a function in a process that is forked from this one, which it leaves as it was.

    Args:
        call: The function. What it returns is pickled.

    Raises:
        ShardingError: The process has ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(call, sender))
    child.start()
    sender.close()
    try:
        result: T = receiver.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        raise ShardingError(f"the process that rehearsed it ended {how}") from None
    child.join()
    return result


def _send_result(call: Callable[[], Any], sender: Connection) -> None:
    torch.set_num_threads(1)
    sender.send(call())
    sender.close()
    os._exit(0)  # without the exit handlers of the script's libraries
