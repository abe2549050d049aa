"""``fsdp list`` and ``fsdp describe NAME``; both import neither torch nor Lightning."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import click

from fsdp_core.cli.output import print_table
from fsdp_core.errors import BrokenStrategyError
from fsdp_core.plugins import registry
from fsdp_core.plugins.auto_info import AUTO
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.discovery import discover, error_text

__all__ = ["describe_strategy", "list_strategies"]

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs to read.")


class _Feature(NamedTuple):
    """What a strategy can do by having certain options, beyond the capabilities of the contract."""

    options: tuple[str, ...]
    asked_by: str
    text: str


_FEATURES: dict[str, tuple[_Feature, ...]] = {
    "async_save": (
        _Feature(("async_save",), "async_save=True", "Checkpoints are written in the background, during training."),
    ),
    "context_parallel": (
        _Feature(("context_parallel_size",), "context_parallel_size=…", "Ranks divide each batch along its sequence."),
    ),
    "float8": (_Feature(("float8",), "float8=True", "Linear layers compute in float8."),),
    "hybrid_sharding": tuple(
        _Feature(options, asked_by, "Groups of ranks hold replicas of the shards.")
        for options, asked_by in (
            (("data_parallel_replicate_size",), "data_parallel_replicate_size=…"),
            (("sharding_strategy", "device_mesh"), "sharding_strategy='HYBRID_SHARD'"),  # as FSDP1 has them
        )
    ),
    "tensor_parallel": (
        _Feature(("tensor_parallel_size",), "tensor_parallel_size=…", "Ranks divide layers, for the same batch."),
    ),
}


@click.command("list")
@_AS_JSON
def list_strategies(as_json: bool) -> None:
    """Show the strategies, and which can run here.

    Also shows which packages could be installed, which plugins are broken or have side effects, and which names are
    ambiguous or stay Lightning's own.
    """
    everything = {
        "strategies": [_row(name) for name in registry.strategies()],
        "not_installed": [
            {"name": name, "package": package, "install": f"pip install {package}"}
            for name, package in registry.not_installed().items()
        ],
        "broken": [
            {
                "name": plugin.name,
                "package": plugin.provider.name,
                "version": plugin.provider.version,
                "error": error_text(plugin.error),
                "remedy": plugin.remedy,
            }
            for plugin in registry.broken()
        ],
        "duplicates": [
            {
                "name": name,
                "packages": [str(provider) for provider in providers],
                "error": str(registry.ambiguous_strategy(name)),
            }
            for name, providers in registry.duplicates().items()
        ],
        "kept_by_lightning": [
            {"name": name, "package": source.name, "version": source.version, "what": what, "remedy": remedy}
            for name, source in registry.kept_names().items()
            for what, remedy in [registry.describe_passed_over(name, source)]
        ],
        "side_effects": [
            {
                "name": plugin.name,
                "package": plugin.provider.name,
                "version": plugin.provider.version,
                "what": effect.what,
                "remedy": effect.remedy,
            }
            for plugin in discover().plugins
            for effect in plugin.side_effects
        ],
    }
    if as_json:
        click.echo(json.dumps(everything, indent=2))
    else:
        _print_list(everything)


@click.command("describe")
@click.argument("name")
@_AS_JSON
def describe_strategy(name: str, as_json: bool) -> None:
    """Show what the strategy NAME can do, and its options with their defaults."""
    info = registry.describe(name)
    facts = {**info.as_dict(), "features": _features({option.name for option in info.options}), **_row(info.name)}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print_description(facts)


def _row(name: str) -> dict[str, Any]:
    provider = registry.provider(name)
    info = registry.describe(name)
    status = "available"
    reason = None
    try:
        registry.check_classes(name)
        reason = registry.unavailable(name)
        status = "available" if reason is None else "unavailable"
        if registry.is_kept(info, provider):
            status = "kept"
            reason = "Lightning keeps this name for its own strategy"
    except BrokenStrategyError as error:
        status = "broken"
        reason = str(error).replace("\n", " ")
    return {
        "name": name,
        "package": provider.name,
        "version": provider.version,
        "accelerators": list(info.accelerators),
        "runs_here": status == "available",
        "status": status,
        "reason": reason,
        "summary": info.summary,
    }


def _print_list(everything: dict[str, Any]) -> None:
    if everything["strategies"]:
        rows = [
            (
                row["name"],
                row["package"],
                row["version"],
                ", ".join(row["accelerators"]),
                "yes" if row["runs_here"] else f"no: {row['reason']}",
            )
            for row in everything["strategies"]
        ]
        print_table(("Name", "Package", "Version", "Accelerators", "Runs here"), rows, width=10_000)  # one line each
    else:
        click.echo("No strategy is installed.")
    if everything["not_installed"]:
        click.echo("\nNot installed:")
        by_install: dict[str, list[str]] = {}
        for row in everything["not_installed"]:
            by_install.setdefault(row["install"], []).append(row["name"])
        for install, names in by_install.items():
            click.echo(f"  {', '.join(names)} → {install}")
    if everything["duplicates"]:
        click.echo("\nAmbiguous:")
        for row in everything["duplicates"]:
            click.echo("  " + row["error"].replace("\n", "\n  "))
    if everything["kept_by_lightning"]:
        click.echo("\nLightning's own:")
        for row in everything["kept_by_lightning"]:
            click.echo(f"  {row['what']}\n  {row['remedy']}")
    if everything["broken"]:
        click.echo("\nBroken:")
        for row in everything["broken"]:
            click.echo(f"  {row['package']} {row['version']} ({row['name']}) failed to load: {row['error']}")
            click.echo(f"  Fix it, or type: {row['remedy']}")
    if everything["side_effects"]:
        click.echo("\nDone while listing, where a plugin should only say its names:")
        for row in everything["side_effects"]:
            click.echo(f"  {row['package']} {row['version']} ({row['name']}) {row['what']}; {row['remedy']}")
    if everything["strategies"]:
        click.echo(f'\nTo let a fit choose one of these, or DDP, by what fits: strategy="{AUTO.name}"')


def _print_description(facts: dict[str, Any]) -> None:
    click.echo(f"{facts['name']} ({facts['package']} {facts['version']})")
    click.echo(f"{facts['summary']}\n")
    named = {option["name"] for option in facts["options"]}
    abilities = {name: _capability(name, named) for name in facts["capabilities"]} | facts["features"]
    rows = [
        ("Runs here", "yes" if facts["runs_here"] else f"no: {facts['reason']}"),
        ("Accelerators", ", ".join(facts["accelerators"])),
        ("Trainer class", _or_none(facts["trainer"])),
        ("Fabric class", _or_none(facts["fabric"])),
        ("Requires", _or_none(", ".join(facts["requires"]))),
        *([] if abilities else [("Can do", "none")]),
    ]
    if facts["presets"]:
        rows.append(("Fixes", ", ".join(f"{name}={value!r}" for name, value in facts["presets"].items())))
    print_table((), rows)
    if abilities:
        click.echo()
        print_table(("Can do", "What it is"), sorted(abilities.items()))
    if facts["options"]:
        click.echo()
        options = [(option["name"], repr(option["default"]), option["help"]) for option in facts["options"]]
        print_table(("Option", "Default", "What it does"), options)


def _capability(name: str, options: Collection[str]) -> str:
    """What a capability is, and how to request it, unless the strategy has its own option for that."""
    meaning = Capability(name)
    if meaning.option and meaning.option not in options:
        return meaning.text
    return f"{meaning.text} Asked for by {meaning.asked_by}"


def _features(options: Collection[str]) -> dict[str, str]:
    """What a strategy with these options can do beyond its capabilities, and how to request it, by name."""
    return {
        name: f"{feature.text} Asked for by {feature.asked_by}"
        for name, features in _FEATURES.items()
        for feature in features
        if set(feature.options) <= set(options)
    }


def _or_none(text: str | None) -> str:
    return text or "none"
