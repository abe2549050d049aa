"""What is wrong with the facts, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_core.device_names import LIGHTNINGS_OWN
from fsdp_core.plugins.discovery import Provider
from fsdp_core.plugins.lightning_names import kept_by_lightning
from fsdp_core.plugins.registry import FIRST_PARTY, ambiguity, describe_passed_over

__all__ = ["Finding", "findings"]

_REPORT_TO_AUTHORS = "report this to the authors of {}"
_SLOW_MACHINE = "if it only takes long here, type: fsdp doctor --timeout 600"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know.

    Attributes:
        level: ``"broken"`` can prevent training; ``"note"`` does not.
        what: The finding, in words.
        remedy: What to do.
    """

    level: Literal["broken", "note"]
    what: str
    remedy: str


def findings(facts: dict[str, Any]) -> list[Finding]:
    """All findings, the broken ones first.

    Args:
        facts: The result of :func:`fsdp_core.doctor.facts.gather`.
    """
    all_findings = [
        *_doctor_findings(facts),
        *_torch_findings(facts),
        *_lightning_findings(facts),
        *(finding for plugin in facts["plugins"] or () for finding in _plugin_findings(plugin)),
        *_name_findings(facts),
    ]
    return sorted(all_findings, key=lambda finding: finding.level)


def _broken(what: str, remedy: str) -> Finding:
    return Finding(level="broken", what=what, remedy=remedy)


def _note(what: str, remedy: str) -> Finding:
    return Finding(level="note", what=what, remedy=remedy)


def _doctor_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    for subject, error in facts["failed"].items():
        yield _broken(f"fsdp doctor could not look at {subject}: {error}", "report this to the authors of fsdp-core")


def _torch_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    torch = facts["torch"] or {}
    machine = facts["machine"] or {}
    packages = facts["device_packages"] or []
    without_packages = (
        f"without {' and '.join(packages)}, which torch loads when it is imported, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
        "and write `import fsdp_core.lightning` in the script"
    )
    if torch.get("installed") is False:
        yield _broken("torch is not installed, and no strategy runs without", "pip install torch")
    elif torch.get("error"):
        remedy = f"mend that first, nothing runs without torch; {_SLOW_MACHINE}"
        yield _broken(f"torch: {torch['error']}", f"{remedy}; to run {without_packages}" if packages else remedy)
    # a vendor's package is loaded where there is no such device
    elif packages and torch.get("devices") == [] and torch.get("accelerator") not in {None, *LIGHTNINGS_OWN}:
        yield _note(
            f"torch's accelerator is {torch['accelerator']!r}, and torch sees no such device; what its package has "
            "changed in torch holds for runs on the CPU too, and may need a device",
            f"if a run on the CPU fails here, to run {without_packages}",
        )
    driver = machine.get("nvidia_driver")
    if driver and torch.get("version") and not torch.get("devices"):
        built = f"built for CUDA {torch['cuda_build']}" if torch.get("cuda_build") else "a build without CUDA"
        yield _note(
            f"there is an NVIDIA driver ({driver}), but torch {torch['version']}, {built}, sees no CUDA device",
            "install a torch built for the driver's CUDA (https://pytorch.org), and look at CUDA_VISIBLE_DEVICES",
        )


def _lightning_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    lightning = facts["lightning"] or {}
    torch = facts["torch"] or {}
    versions = facts["versions"] or {}
    if lightning.get("installed") is False:
        packages = [name for name in ("pytorch-lightning", "lightning-fabric") if versions.get(name)]
        explanation = f" (our strategies don't work in {' and '.join(packages)})" if packages else ""
        yield _broken(
            f"lightning is not installed{explanation}, so no Trainer takes our names", "pip install lightning"
        )
    elif lightning.get("error") and not torch.get("error"):
        yield _broken(f"lightning: {lightning['error']}", f"mend what is broken in plugins first; {_SLOW_MACHINE}")
    prefixes = tuple(f"the strategy {name!r} of " for name, _ in _claims_of_lightning_names(facts))
    for warning in lightning.get("warnings", ()):
        if warning.startswith(prefixes):
            continue
        what, _, remedy = warning.partition("\n")
        yield _note(what, remedy)
    if torch.get("autoload") is False:
        value = (facts["environment"] or {}).get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        why = f"TORCH_DEVICE_BACKEND_AUTOLOAD={value}" if value else "torch did not call fsdp_core.autoload"
        yield _note(
            f"our names are not entered in Lightning by themselves: {why}",
            "write `import fsdp_core.lightning` in the script, or unset the variable",
        )
    elif torch.get("autoload") and lightning.get("done") and not lightning.get("error"):
        names = sorted({row["name"] for plugin in facts["plugins"] or () for row in plugin["strategies"]})
        entered_names = {name for front_end in ("trainer", "fabric") for name in _all_names(lightning.get(front_end))}
        missing = [name for name in names if name not in entered_names and name != "auto"]
        if missing:
            yield _broken(
                f"these names are not entered in Lightning: {', '.join(missing)}",
                "write `import fsdp_core.lightning` in the script, and report this to the authors of fsdp-core",
            )


def _plugin_findings(plugin: dict[str, Any]) -> Iterator[Finding]:
    package = plugin["package"]
    plugin_text = f"{package} {plugin['version']} ({plugin['name']})"
    if plugin["error"]:
        yield _broken(f"{plugin_text} failed to load: {plugin['error']}", plugin["remedy"])
    if plugin["at_exit"]:
        yield _broken(
            f"{plugin_text}: {plugin['at_exit']}",
            f"{_REPORT_TO_AUTHORS.format(package)}, or type: pip uninstall {package}",
        )
    for complaint in plugin["complaints"]:
        yield _note(
            f"{plugin_text} {complaint['what']}", f"{_REPORT_TO_AUTHORS.format(package)}: {complaint['remedy']}"
        )
    if not plugin["bounded"] and not plugin["error"]:
        required = plugin["requires_core"]
        requirement = f"requires fsdp-core{required or ' of any version'}, without an upper bound"
        if required is None:
            requirement = "does not say which fsdp-core it requires"
        yield _note(
            f"{plugin_text} {requirement}, so that one with another contract would load it too",
            f"{_REPORT_TO_AUTHORS.format(package)}: it should require what it was built for, such as "
            "fsdp-core>=0.1,<0.2",
        )
    for row in plugin["strategies"]:
        if row.get("status") == "broken":
            what, _, remedy = row["reason"].partition("\n")
            yield _broken(what, remedy)


def _name_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    claims: dict[str, list[Provider]] = {}
    for plugin in facts["plugins"] or ():
        for row in plugin["strategies"]:
            claims.setdefault(row["name"], []).append(Provider(name=plugin["package"], version=plugin["version"]))
    for name, providers in claims.items():
        if len(providers) > 1:
            yield _broken(*ambiguity(name, providers))
    for name, claimed_by in _claims_of_lightning_names(facts):
        yield _broken(*describe_passed_over(name, claimed_by))
    if facts["plugins"] == []:
        packages = " or ".join(f"pip install {package}" for package in dict.fromkeys(FIRST_PARTY.values()))
        yield _note("no package with strategies is installed", packages)


def _claims_of_lightning_names(facts: dict[str, Any]) -> list[tuple[str, Provider]]:
    """The claims to Lightning's own names."""
    claims = [
        (row["name"], Provider(name=plugin["package"], version=plugin["version"]))
        for plugin in facts["plugins"] or ()
        for row in plugin["strategies"]
    ]
    return [(name, source) for name, source in claims if kept_by_lightning(name, source.canonical_name)]


def _all_names(registry: dict[str, list[str]] | None) -> list[str]:
    return [*registry["ours"], *registry["lightnings"]] if registry else []
