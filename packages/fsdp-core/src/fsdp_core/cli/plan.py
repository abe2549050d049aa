"""``fsdp plan SCRIPT``: the memory and traffic of a training script under each strategy, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from fsdp_core.cli.output import format_count, format_size, print_json, print_table
from fsdp_core.cli.scripts import script_command, script_output_on_stderr
from fsdp_core.device_names import REHEARSED
from fsdp_core.sizes import parse_size

if TYPE_CHECKING:
    from fsdp_core.rehearsal.fabric_loop import CaughtLoop
    from fsdp_core.rehearsal.planning import Outcome
    from fsdp_core.rehearsal.script import CaughtFit

__all__ = ["plan"]

#: The exit status where no strategy fits: other than that of an error, so that a job of CI can tell them apart.
_NOTHING_FITS = 3


def _read_size(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@script_command(
    "plan",
    click.option("--devices", type=click.IntRange(1, 16_384), help="How many devices. Default: those that are here."),
    click.option(
        "--memory", metavar="SIZE", callback=_read_size, help="What each has, such as 80GiB. Default: as here."
    ),
    click.option(
        "--time", "with_time", is_flag=True, help="Expect a step's time on the devices that are here, which are tried."
    ),
    click.option(
        "--device",
        type=click.Choice(REHEARSED),
        default=REHEARSED[0],
        show_default=True,
        help="The kind of device. All but the default are by rules that no card has confirmed.",
    ),
    click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank that is rehearsed."),
    click.option(
        "--plot", metavar="FILE", help="Draw the memory of a step, of the first row, as FILE: .svg, .png, .pdf."
    ),
)
def plan(
    ctx: click.Context,
    script: str,
    arguments: tuple[str, ...],
    devices: int | None,
    memory: int | None,
    with_time: bool,
    device: str,
    rank: int,
    plot: str | None,
    fits: int,
    patience: float,
    as_module: bool,
    as_json: bool,
) -> None:
    """Show what the training script SCRIPT needs under each strategy, without training.

    The script runs unchanged, with its ARGUMENTS, up to Trainer.fit(). That takes one batch, and is rehearsed: two
    optimizer steps on tensors without memory, as one rank of --devices, for each strategy that is installed and the
    options that change its memory. No rank is started.

    Exit status: 0, or 3 if nothing fits the memory, 1 for an error, 2 for wrong usage.
    """
    from fsdp_core.rehearsal.candidates import candidates_for
    from fsdp_core.rehearsal.changes import cheapest_changes
    from fsdp_core.rehearsal.planning import devices_here, ranked, rehearse_candidate
    from fsdp_core.rehearsal.script import run_script
    from fsdp_core.rehearsal.speed import expected_seconds, measure_speeds

    here, memory_here = devices_here()
    devices, memory = devices or here, memory or memory_here
    if rank >= devices:
        raise click.BadParameter(f"--rank {rank} is none of {devices} ranks, which are numbered from 0.")
    refused: dict[str, str] = {}
    plans: list[tuple[CaughtFit | CaughtLoop, list[Outcome], list[Outcome]]] = []

    def rehearse(fit: CaughtFit | CaughtLoop) -> None:
        candidates, without = candidates_for(devices, fit.module, fit.script_strategy)
        outcomes = [
            rehearse_candidate(fit, candidate, min(rank, candidate.ranks - 1), draws=plot is not None, device=device)
            for candidate in candidates
        ]
        if with_time:
            precision = fit.precision
            speeds = {number: measure_speeds(number, precision) for number in {o.ranks for o in outcomes}}
            outcomes = [replace(o, expected_seconds=expected_seconds(o, speeds[o.ranks])) for o in outcomes]
        refused.update(without)
        does_fit = any(outcome.fits(memory) for outcome in outcomes)
        changes = (
            [] if does_fit else cheapest_changes(fit, list(zip(candidates, outcomes, strict=True)), memory, device)
        )
        plans.append((fit, ranked(outcomes, memory), changes))

    with script_output_on_stderr():
        failure = run_script(
            script, arguments, rehearse, ranks=devices, fits=fits, patience=patience, as_module=as_module
        )
    if plot is not None:
        _draw_first(plans[0][1], plot)
    if as_json:
        print_json(
            {
                "devices": devices,
                "memory_bytes": memory,
                "rank": rank,
                "fits": [_as_data(fit, outcomes, changes, memory) for fit, outcomes, changes in plans],
                "not_rehearsed": refused,
                "script_failed": failure,
            }
        )
    else:
        for fit, outcomes, changes in plans:
            _print_plan(fit, outcomes, changes, devices, memory, device)
        for name, why in refused.items():
            click.echo(f"Not rehearsed: {name}: {why}.")
        if failure is not None:
            click.echo(f"After that, the script {failure}. If it has other fits, they are not planned.")
    ctx.exit(0 if all(any(o.fits(memory) for o in outcomes) for _, outcomes, _ in plans) else _NOTHING_FITS)


def _draw_first(outcomes: Sequence[Outcome], path: str) -> None:
    """Draw the memory of the best plan, if one was made."""
    from fsdp_core.rehearsal.picture import draw

    best = outcomes[0]
    if best.curve is not None:
        ranks = f", one rank of {best.ranks}" if best.ranks > 1 else ""
        draw(best.curve, f"{best.code}{ranks}", path)


def _as_data(
    fit: CaughtFit | CaughtLoop, outcomes: Sequence[Outcome], changes: Sequence[Outcome], memory: int
) -> dict[str, Any]:
    def rows(of: Sequence[Outcome]) -> list[dict[str, Any]]:
        data = [{**asdict(replace(outcome, curve=None)), "fits": outcome.fits(memory)} for outcome in of]
        return [{name: value for name, value in row.items() if name != "curve"} for row in data]

    facts = {"location": fit.location, "module": type(fit.module).__name__, "left_out": fit.left_out}
    return {**facts, "plans": rows(outcomes), "changes": rows(changes)}


def _format_time(outcome: Outcome) -> str:
    if outcome.expected_seconds is None:
        return ""
    least, most = outcome.expected_seconds
    return f"{least * 1000:.2g} to {most * 1000:.2g} ms" if most < 1 else f"{least:.2g} to {most:.2g} s"


def _print_changes(changes: Sequence[Outcome], least: str) -> None:
    if not changes:
        click.echo(
            f"Nothing fits. The least is {least} a device: use more devices, a smaller batch with "
            "accumulate_grad_batches, or cpu_offload=True."
        )
        return
    click.echo(f"Nothing fits. The least is {least} a device. What would fit:")
    for change in changes:
        click.echo(f"  {change.code}: {format_size(change.needed_bytes)} a device")


#: The columns of the peak's parts: their titles, and what they hold.
_PARTS = (
    ("params", ("parameters", "buffers")),
    ("grads", ("gradients",)),
    ("optim.", ("optimizer state",)),
    ("activ.", ("activations", "batch")),
    ("gathered", ("gathered parameters", "communication")),
    ("other", ("backward", "optimizer step", "other")),
)


def _print_plan(
    fit: CaughtFit | CaughtLoop,
    outcomes: Sequence[Outcome],
    changes: Sequence[Outcome],
    devices: int,
    memory: int,
    device: str,
) -> None:
    numel = max((outcome.parameters for outcome in outcomes), default=0)
    click.echo(
        f"{type(fit.module).__name__} at {fit.location}: {format_count(numel)} parameters, "
        f"{devices} device{'s' * (devices > 1)} of {format_size(memory)}"
    )
    on_card = (f"on {device}",) if any(outcome.beside_tensors for outcome in outcomes) else ()
    times = ("time/step",) if any(outcome.expected_seconds for outcome in outcomes) else ()
    header = ("fits", *on_card, "peak", *(title for title, _ in _PARTS), "sent/step", *times, "write")
    rows = []
    for outcome in outcomes:
        if outcome.error is not None:
            continue
        parts = [format_size(sum(outcome.by_content.get(content, 0) for content in contents)) for _, contents in _PARTS]
        fits = "yes" if outcome.fits(memory) else "no"
        needed = [format_size(outcome.needed_bytes) for _ in on_card]
        sent, time = format_size(outcome.sent_bytes), [_format_time(outcome)] if times else []
        rows.append((fits, *needed, format_size(outcome.peak_bytes), *parts, sent, *time, outcome.code))
    if rows:
        print_table(header, rows, right=range(1, len(header) - 1))
    best = outcomes[0]
    if best.fits(memory):
        moment = f"{best.phase} pass" if best.phase in ("forward", "backward") else best.phase
        click.echo(f"The first has its peak in the {moment}{f', in {best.module}' if best.module else ''}.")
    elif rows:
        _print_changes(changes, rows[0][1])
    if best.beside_tensors:
        beside = ", ".join(f"{what} {format_size(nbytes)}" for what, nbytes in best.beside_tensors.items())
        click.echo(f"On {device}, by rules that no card has confirmed, the first needs beside its tensors: {beside}.")
    errors: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors.setdefault(outcome.error, []).append(outcome.code)
    for error, written in errors.items():
        click.echo(f"Not planned: {', '.join(written)}: {error}")
    for what, location in dict.fromkeys((w, at) for o in outcomes for w, at, _ in o.assumptions):
        click.echo(f"Assumed: {what}{f', at {location}' if location else ''}")
    if fit.left_out:
        click.echo(
            f"Left out of the rehearsal: {', '.join(fit.left_out)}. What they allocate or change is in no number."
        )
