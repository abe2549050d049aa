"""``fsdp prove SCRIPT``: whether a training script trains on ranks as it does in one process."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fsdp_core.cli.output import print_json, print_table
from fsdp_core.cli.scripts import script_command, script_output_on_stderr
from fsdp_core.errors import ShardingError

if TYPE_CHECKING:
    from fsdp_core.proving.proof import Proof
    from fsdp_core.rehearsal.fabric_loop import CaughtLoop
    from fsdp_core.rehearsal.script import CaughtFit

__all__ = ["prove"]

#: The exit status where something differs, and where nothing does but not all could be told.
_DIFFERS, _UNCLEAR = 3, 4


def _read_options(ctx: click.Context, parameter: click.Parameter, words: Sequence[str]) -> dict[str, Any]:
    options = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise click.BadParameter(f"{word!r} is no option. Write NAME=VALUE, as in reshard_after_forward=false.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


@script_command(
    "prove",
    click.option("--only", metavar="STRATEGY", help='This strategy alone; or "script" or "references".'),
    click.option("--option", "options", multiple=True, callback=_read_options, help="NAME=VALUE, in JSON, for --only."),
    click.option(
        "--accept", multiple=True, metavar="CAUSE", help="A difference of this cause is none, e.g. batchnorm."
    ),
    click.option("--timeout", default=120.0, show_default=True, help="Seconds that one run may take."),
)
def prove(
    ctx: click.Context,
    script: str,
    arguments: tuple[str, ...],
    only: str | None,
    options: dict[str, Any],
    accept: tuple[str, ...],
    timeout: float,
    fits: int,
    patience: float,
    as_module: bool,
    as_json: bool,
) -> None:
    """Show whether the training script SCRIPT trains on ranks as it does in one process.

    The script runs unchanged, with its ARGUMENTS, up to Trainer.fit(). Then its module is trained for three steps, in
    fp64 on the CPU and without dropout: in one process on whole batches; in one process as each rank in turn; and on
    two real ranks by each installed strategy, with options by pairs. All must be the same.

    Exit status: 0 if they are, 3 if something differs, 4 if not all can be told, 1 for an error, 2 for wrong usage.
    """
    if options and only is None:
        raise click.UsageError("--option is for one strategy. Name it: --only STRATEGY.")
    import torch

    from fsdp_core.proving.causes import CAUSES
    from fsdp_core.proving.faults import FAULTS
    from fsdp_core.proving.proof import BATCHES, RANKS, prove_fit
    from fsdp_core.rehearsal.fabric_loop import CaughtLoop
    from fsdp_core.rehearsal.script import run_script

    for cause in accept:
        if cause not in {*CAUSES, *FAULTS}:
            raise click.BadParameter(f"--accept {cause}: the causes are {', '.join((*CAUSES, *FAULTS))}.")

    def tell(words: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"... {words}", err=True)

    torch.set_num_threads(1)  # each run has one, too
    proofs: list[tuple[CaughtFit, Proof]] = []

    def prove_caught(fit: CaughtFit | CaughtLoop) -> None:
        if isinstance(fit, CaughtLoop):
            raise ShardingError(
                f"{fit.location} sets up a loop under Fabric, of which a proof can't play one rank after the other.\n"
                "Prove a LightningModule with the same step under a Trainer. fsdp plan and fsdp rehearse take the loop."
            )
        proofs.append((fit, prove_fit(fit, seconds=timeout, only=only, options=options or None, tell=tell)))

    with script_output_on_stderr():
        failure = run_script(
            script,
            arguments,
            prove_caught,
            ranks=RANKS,
            fits=fits,
            batches=BATCHES,
            patience=patience,
            as_module=as_module,
        )
    if as_json:
        as_data = [
            {
                "location": fit.location,
                "module": type(fit.module).__name__,
                "dtype": proof.dtype,
                "rows": [asdict(row) for row in proof.rows],
            }
            for fit, proof in proofs
        ]
        print_json({"fits": as_data, "not_run": proofs[0][1].not_run, "script_failed": failure})
    else:
        command = shlex.join(["-m", script, *arguments] if as_module else [script, *arguments])
        for fit, proof in proofs:
            _print_proof(fit, proof, accept, command)
        if failure is not None:
            click.echo(f"After that, the script {failure}. If it has other fits, they are not proven.")
    if any(proof.differences(accept) for _, proof in proofs):
        ctx.exit(_DIFFERS)
    ctx.exit(_UNCLEAR if any(proof.unclear for _, proof in proofs) else 0)


def _print_proof(fit: CaughtFit, proof: Proof, accepted: Sequence[str], command: str) -> None:
    click.echo(f"{type(fit.module).__name__} at {fit.location}: three steps in {proof.dtype} on two ranks")
    rows = []
    for row in proof.rows:
        verdict = "accepted" if row.verdict == "differs" and row.cause in accepted else row.verdict
        is_compared = row.verdict in ("same", "differs")
        rows.append(
            (verdict, f"{row.worst:.0e}" if is_compared else "", f"{row.seconds:.1f} s", row.with_what, row.what)
        )
    print_table(("verdict", "differs by", "took", "compared with", "run"), rows, right=(1, 2))
    for row in proof.rows:
        if row.verdict == "same":
            continue
        click.echo(f"{row.what}: {row.verdict}: {row.words}{'.' * (not row.words.endswith('.'))}")
        if row.remedy:
            click.echo(f"  {row.remedy}")
        if row.verdict != "refused":
            click.echo(f"  Again: fsdp prove {row.repeated_by} {command}")
    if not proof.differences(accepted) and not proof.unclear:
        has_refused = any(row.verdict == "refused" for row in proof.rows)
        click.echo(f"Proven: all {'that can be run ' * has_refused}train the same.")
    for name, why in proof.not_run.items():
        click.echo(f"Not run: {name}: {why}.")
    if fit.left_out:
        click.echo(f"Left out: {', '.join(fit.left_out)}.")
