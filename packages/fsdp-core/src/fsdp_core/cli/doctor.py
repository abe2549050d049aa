"""``fsdp doctor``: what is installed, what is broken, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from fsdp_core.cli.output import clean, format_size, print_json, print_table
from fsdp_core.doctor.child import ask
from fsdp_core.doctor.facts import gather
from fsdp_core.doctor.findings import Finding, findings

__all__ = ["doctor"]

_WIDTH = 100


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs to read.")
@click.option("--device", metavar="KIND", help="Try what a kind of device, such as npu, must provide.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds that each process may take to answer.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, device: str | None, timeout: float) -> None:
    """Look for what is broken here, for you and for bug reports.

    Shows plugins, versions, devices, process-group backends, environment variables, and what each strategy lacks to
    run here. Plugins, torch and Lightning are loaded in processes of their own. Exit status: 0, or 1 if something is
    broken.

    With --device, it tries on that device what torch's fully_shard and this package need of it, and exits with 1 if
    something is missing.
    """
    if device is not None:
        ctx.exit(_try_device(device, as_json, timeout))
    facts = gather(timeout)
    all_findings = findings(facts)
    if as_json:
        print_json({**facts, "findings": [vars(finding) for finding in all_findings]})
    else:
        _print_versions(facts)
        _print_plugins(facts["plugins"] or [])
        _print_machine(facts)
        _print_lightning(facts["lightning"] or {}, facts["torch"] or {})
        variables = list((facts["environment"] or {}).items())
        _print_table("Environment variables", (), variables, "none that matters is set")
        _print_findings(all_findings)
    ctx.exit(1 if any(finding.level == "broken" for finding in all_findings) else 0)


def _try_device(kind: str, as_json: bool, timeout: float) -> int:
    """Print what a kind of device provides; the exit status."""
    answer = ask("device_child", kind, seconds=timeout)
    rows = answer.data.get("requirements", [])
    if not answer.data.get("done"):
        tried = answer.data.get("trying", "torch")
        for row in rows:
            if row["name"] == tried:
                row["result"] = f"the process that tried it {answer.failure}"
        if not rows:
            raise click.ClickException(f"the process that imports torch {answer.failure}")
    missing = [row for row in rows if row["is_needed"] and row["result"] != "there"]
    if as_json:
        print_json({"device": kind, "requirements": rows})
        return 1 if missing else 0
    words = {None: "not tried", "there": "yes"}
    shown = [(row["name"], words.get(row["result"], "no"), row["purpose"]) for row in rows]
    _print_table(f"What sharding by torch's fully_shard needs of {kind!r}", ("What", "There", "What for"), shown)
    for row in rows:
        if row["result"] not in words:
            needed = "Needed" if row["is_needed"] else "Runs without"
            click.echo(f"{needed}: {row['name']}, by {row['api']}.\n  {row['result']}")
    click.echo(f"Strategies over fully_shard {'do not run' if missing else 'run'} on {kind!r}.")
    return 1 if missing else 0


def _print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], otherwise: str = "") -> None:
    click.echo(f"{title}:")
    if rows:
        print_table(header, [tuple(clean(cell) for cell in row) for row in rows], width=_WIDTH)
    else:
        click.echo(otherwise)
    click.echo()


def _print_versions(facts: dict[str, Any]) -> None:
    always = ("torch", "lightning")
    versions = [(name, version) for name, version in (facts["versions"] or {}).items() if version or name in always]
    rows = [(name, version or "not installed") for name, version in versions]
    _print_table("Versions", (), [("contract", facts["contract"]), *rows])


def _print_plugins(plugins: list[dict[str, Any]]) -> None:
    rows = [
        (
            plugin["package"],
            plugin["version"],
            "" if plugin["seconds"] is None else f"{plugin['seconds']:.2f} s",
            f"{plugin['name']} = {plugin['module']}",
            "broken, see below" if plugin["error"] else _built_for(plugin["requires_core"]),
        )
        for plugin in plugins
    ]
    _print_table("Plugins", ("Package", "Version", "Loads in", "Entry point", "Built for"), rows, "none is installed")
    strategies = [
        (row["name"], plugin["package"], ", ".join(row["accelerators"]), _runs_here(row))
        for plugin in plugins
        for row in plugin["strategies"]
    ]
    if strategies:
        _print_table("Strategies", ("Name", "Package", "Accelerators", "Runs here"), sorted(strategies))


def _built_for(required: str | None) -> str:
    return "it does not say" if required is None else f"fsdp-core{required or ', any version'}"


def _runs_here(row: dict[str, Any]) -> str:
    if "status" not in row:
        return "no answer, see below"
    return {"available": "yes", "broken": "broken, see below"}.get(row["status"], f"no: {row['reason']}")


def _print_machine(facts: dict[str, Any]) -> None:
    machine, torch, versions = (facts[subject] or {} for subject in ("machine", "torch", "versions"))
    rows = []
    if machine:
        memory = f", {format_size(machine['memory'])} memory" if machine["memory"] else ""
        rows.append(("CPU", f"{machine['cpus']} × {machine['processor']}, {machine['usable_cpus']} usable{memory}"))
        rows.append(("NVIDIA driver", machine["nvidia_driver"] or "none found"))
    if torch.get("version"):
        build = f"CUDA {torch['cuda_build']}" if torch.get("cuda_build") else "no CUDA"
        rows.append(("torch's build", f"ROCm {torch['hip_build']}" if torch.get("hip_build") else build))
    for device in torch.get("devices", ()):
        what = [device["model"] or "unnamed"]
        if device["memory"] is not None:
            what.append(format_size(device["memory"]))
        if device["capability"] is not None:
            what.append(f"compute capability {device['capability']}")
        rows.append((device["name"], ", ".join(what)))
    if torch.get("devices") == []:
        kind = torch.get("accelerator")
        rows.append(("Accelerators", f"none of kind {kind!r} that torch sees" if kind else "none that torch knows"))
    if facts["device_packages"]:
        rows.append(("Loaded by torch", ", ".join(facts["device_packages"])))
    if machine.get("tpu_files") or versions.get("torch-xla"):
        files = ", ".join(machine.get("tpu_files") or ()) or "no device files"
        rows.append(("XLA", f"torch-xla {versions.get('torch-xla') or 'is not installed'}; {files}"))
    _print_table("Devices", (), rows)
    groups = dict(torch.get("process_groups", {}))
    releases = {name: f" ({release})" for name, release in torch.get("libraries", {}).items()}
    rows = [(name, f"yes{releases.get(name, '')}" if there else "no") for name, there in groups.items()]
    if versions.get("torch-xla"):
        rows.append(("xla", "with torch_xla"))
    _print_table("Process-group backends", (), rows, "unknown: torch did not say")


def _print_lightning(lightning: dict[str, Any], torch: dict[str, Any]) -> None:
    autoload = torch.get("autoload")
    answer = "unknown"
    if autoload is not None:
        answer = "yes" if autoload else "no"
    rows = [("Entered by themselves", answer)]
    rows += [
        (f"In {front_end.title()}", ", ".join(lightning[front_end]["ours"]) or "none")
        for front_end in ("trainer", "fabric")
        if front_end in lightning
    ]
    _print_table("Our names in Lightning", (), rows)


def _print_findings(all_findings: list[Finding]) -> None:
    count = sum(finding.level == "broken" for finding in all_findings)
    if not all_findings:
        click.echo("Nothing is wrong.")
        return
    click.echo(f"Findings: {count} broken, {len(all_findings) - count} to note")
    print_table(
        (), [(finding.level, clean(f"{finding.what} → {finding.remedy}")) for finding in all_findings], width=_WIDTH
    )
