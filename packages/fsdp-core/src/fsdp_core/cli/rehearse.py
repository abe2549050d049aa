"""``fsdp rehearse SCRIPT``: one rank of many, before any of them is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fsdp_core.cli.output import format_count, format_size, print_json, print_table
from fsdp_core.cli.scripts import script_command, script_output_on_stderr
from fsdp_core.errors import FSDPError, ShardingError, first_line

if TYPE_CHECKING:
    from fsdp_core.rehearsal.candidates import Candidate
    from fsdp_core.rehearsal.fabric_loop import CaughtLoop
    from fsdp_core.rehearsal.large_scale import RankRehearsal
    from fsdp_core.rehearsal.script import CaughtFit
    from fsdp_core.rehearsal.traffic import Difference

__all__ = ["rehearse"]

#: The exit status where the formula and the count of bytes differ.
_DIFFERS = 3

#: Padding of less than this part of all that is gathered is not worth a line.
_LEAST_PADDING = 0.01


@script_command(
    "rehearse",
    click.option("--ranks", type=click.IntRange(2, 16_384), required=True, help="How many ranks."),
    click.option("--rank", type=click.IntRange(0), help="The rank that is rehearsed. Default: the last one."),
    click.option("--strategy", metavar="NAME", help="The strategy. Default: that of the script."),
)
def rehearse(
    ctx: click.Context,
    script: str,
    arguments: tuple[str, ...],
    ranks: int,
    rank: int | None,
    strategy: str | None,
    fits: int,
    patience: float,
    as_module: bool,
    as_json: bool,
) -> None:
    """Show what one of many ranks of the training script SCRIPT does, without starting any.

    The script runs unchanged, with its ARGUMENTS, up to Trainer.fit(). Two optimizer steps of that, a sharded save and
    a load run on tensors without memory, as one rank of --ranks. The bytes that it communicates are counted, and
    compared with the formula for each unit; and what only many ranks show is named.

    Exit status: 0, or 3 if formula and count differ, 1 for an error, 2 for wrong usage.
    """
    from fsdp_core.rehearsal.candidates import candidate_of, check_rehearsable
    from fsdp_core.rehearsal.fabric_loop import CaughtLoop
    from fsdp_core.rehearsal.forks import call_in_fork
    from fsdp_core.rehearsal.script import run_script

    rank = ranks - 1 if rank is None else rank
    if rank >= ranks:
        raise click.BadParameter(f"--rank {rank} is none of {ranks} ranks, which are numbered from 0.")
    if strategy is not None:
        check_rehearsable(strategy)
    rehearsals: list[tuple[CaughtFit | CaughtLoop, Candidate, RankRehearsal]] = []

    def rehearse_caught(fit: CaughtFit | CaughtLoop) -> None:
        candidate = candidate_of(fit.script_strategy, strategy, ranks)
        rehearsal = _Rehearse(fit, candidate, rank)
        result = rehearsal.of_loop(fit) if isinstance(fit, CaughtLoop) else call_in_fork(rehearsal)
        if isinstance(result, str):
            raise ShardingError(result)
        rehearsals.append((fit, candidate, result))

    with script_output_on_stderr():
        failure = run_script(
            script, arguments, rehearse_caught, ranks=ranks, fits=fits, patience=patience, as_module=as_module
        )
    if as_json:
        print_json({"fits": [_as_data(*each) for each in rehearsals], "script_failed": failure})
    else:
        for each in rehearsals:
            _print_rehearsal(*each)
        if failure is not None:
            click.echo(f"After that, the script {failure}. If it has other fits, they are not rehearsed.")
    ctx.exit(_DIFFERS if any(result.differences for _, _, result in rehearsals) else 0)


class _Rehearse:
    """Rehearses a rank, in a process of its own; returns an error in words."""

    def __init__(self, fit: CaughtFit | CaughtLoop, candidate: Candidate, rank: int) -> None:
        self._fit, self._candidate, self._rank = fit, candidate, rank

    def __call__(self) -> RankRehearsal | str:
        from fsdp_core.rehearsal.fit import RehearsedRun
        from fsdp_core.rehearsal.large_scale import rehearse_rank
        from fsdp_core.rehearsal.script import CaughtFit

        fit, candidate = self._fit, self._candidate
        assert isinstance(fit, CaughtFit)
        try:
            return rehearse_rank(
                RehearsedRun(
                    build=lambda: fit.module,
                    batch=fit.batch,
                    batches=fit.batches,
                    loader=fit.train_loader,
                    datamodule=fit.datamodule,
                    loggers=fit.loggers,
                    trainer_arguments=fit.trainer_arguments,
                    strategy=candidate.build(),
                    ranks=candidate.ranks,
                    rank=self._rank,
                    precision=fit.trainer_keywords.get("precision"),
                )
            )
        except Exception as error:
            return self._explain(error)

    def of_loop(self, loop: CaughtLoop) -> RankRehearsal | str:
        """The same of a loop under Fabric, which goes on in a process of its own."""
        from fsdp_core.rehearsal.large_scale import rehearse_rank_of_loop

        return rehearse_rank_of_loop(loop, self._candidate, self._rank, self._explain)

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, FSDPError):
            return str(error)
        return f"the rehearsal of {self._candidate.code} ended in {type(error).__name__}: {first_line(error)}"


# -- output ------------------------------------------------------------------------------------------------------------


def _as_data(fit: CaughtFit | CaughtLoop, candidate: Candidate, result: RankRehearsal) -> dict[str, Any]:
    return {
        "location": fit.location,
        "module": type(fit.module).__name__,
        "strategy": candidate.strategy,
        "rank": result.rank,
        "ranks": result.ranks,
        "parameters": result.numel,
        "peak": asdict(result.peak),
        "operations": result.operations,
        "collectives": {name: {"calls": calls, "sent": sent} for name, (calls, sent) in result.collectives.items()},
        "units": [asdict(unit) for unit in result.units],
        "unchecked": result.unchecked,
        "differences": [asdict(difference) for difference in result.differences],
        "padding_ratio": result.padding_ratio,
        "padding_bytes": result.padding_nbytes,
        "empty_parameters": result.empty_parameters,
        "ranks_without_parameters": result.ranks_without_parameters,
        "ranks_without_data": result.ranks_without_data(fit.batches),
        "overflowing_units": result.overflowing_units,
        "exchanges": [{**asdict(exchange), "times": times} for exchange, times in result.exchanges.items()],
        "checkpoint": asdict(result.checkpoint),
        "assumptions": [[a.what, a.location, times] for a, times in result.assumptions.items()],
        "left_out": fit.left_out,
        "seconds": result.seconds,
    }


def _print_rehearsal(fit: CaughtFit | CaughtLoop, candidate: Candidate, result: RankRehearsal) -> None:
    click.echo(
        f"{type(fit.module).__name__} at {fit.location}: {format_count(result.numel)} parameters, "
        f"rank {result.rank:,} of {result.ranks:,}, {candidate.code}"
    )
    rows = [(name, f"{calls:,}", format_size(sent)) for name, (calls, sent) in result.collectives.items()]
    if rows:
        print_table(("in a step", "calls", "sent"), rows, right=(1, 2))
    click.echo(_comparison(result))
    for difference in result.differences:
        click.echo(f"  {_describe(difference)}")
    parts = ", ".join(f"{content} {format_size(nbytes)}" for content, nbytes in result.peak.by_content.items())
    moment = f"{result.peak.phase}{f', in {result.peak.module}' if result.peak.module else ''}"
    click.echo(f"Peak: {format_size(result.peak.nbytes)} ({moment}): {parts}.")
    click.echo(f"Operations: {result.operations:,} in a step.")
    checkpoint = result.checkpoint
    click.echo(
        f"Checkpoint: this rank writes {format_size(checkpoint.nbytes)} in {checkpoint.boxes:,} pieces, and reads them "
        "again; what a load finds fits the module and its optimizers."
    )
    for line in _lines_of_scale(fit, result):
        click.echo(line)
    for assumption in result.assumptions:
        click.echo(f"Assumed: {assumption.what}{f', at {assumption.location}' if assumption.location else ''}")
    if fit.left_out:
        click.echo(f"Left out of the rehearsal: {', '.join(fit.left_out)}.")


def _comparison(result: RankRehearsal) -> str:
    if result.unchecked is not None:
        return f"By formula: not known, since {result.unchecked}."
    calls, sent = result.beside
    beside = f"; {_count(calls, 'other collective')} of {format_size(sent)} beside" if calls else ""
    if not result.differences:
        return f"By formula: the same, for {_count(len(result.units), 'unit')}{beside}."
    return f"By formula: other bytes{beside}."


def _describe(difference: Difference) -> str:
    units = _first_names(difference.units) if difference.units else "no unit"
    return (
        f"{difference.name} of {difference.nbytes:,} bytes on {difference.ranks:,} ranks, of {units}: "
        f"{difference.expected:,} by formula, {difference.counted:,} counted"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _first_names(names: Sequence[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest:,} more" if rest > 0 else "")


def _lines_of_scale(fit: CaughtFit | CaughtLoop, result: RankRehearsal) -> Iterator[str]:
    """What only many ranks show, a line each."""
    if result.padding_ratio >= 1 + _LEAST_PADDING:
        worst = max(result.units, key=lambda unit: unit.gathered_numel / unit.numel)
        yield (
            f"Padding: units are gathered with {result.padding_ratio:.2f} × their elements, {worst.label} with "
            f"{worst.gathered_numel / worst.numel:.2f} ×: {format_size(result.padding_nbytes)} in each gather of all. "
            "Shard over fewer ranks, with replicas."
        )
    if result.empty_parameters:
        nothing = result.ranks_without_parameters
        ranks = f"; {nothing:,} ranks have nothing of any" if nothing else ""
        yield (
            f"Empty shards: this rank has nothing of {result.empty_parameters:,} of {result.parameters:,} "
            f"parameters{ranks}."
        )
    without_data = result.ranks_without_data(fit.batches)
    if without_data:
        yield (
            f"Data: the loader has {fit.batches:,} batches for {result.data_ranks:,} ranks. {without_data:,} have none "
            "of their own: samples are repeated, or the batches get smaller."
        )
    if result.overflowing_units:
        yield (
            f"32 bits: a gather of {_first_names(result.overflowing_units)} has more than 2³¹ elements, which kernels "
            "with 32-bit indexes do not reach. Make smaller units."
        )
    checkpoint = result.checkpoint
    yield (
        f"Grows with the ranks: {checkpoint.files:,} files in a checkpoint, of which a load compares "
        f"{checkpoint.verified_files:,} on each rank; the first rank receives "
        f"{format_size(checkpoint.message_nbytes * result.ranks)} of messages about them."
    )
    gathered = list(result.exchanges.elements())
    if gathered:
        largest = max(gathered, key=lambda exchange: exchange.nbytes * exchange.ranks)
        yield (
            f"  Objects gathered in host memory: {_count(len(gathered), 'time')}, at most "
            f"{format_size(largest.nbytes * largest.ranks)} on {'each' if largest.is_by_all else 'one'} rank."
        )
