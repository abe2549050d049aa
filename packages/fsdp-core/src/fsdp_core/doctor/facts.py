"""Gathers the facts, as plain data: the JSON of ``fsdp doctor --json``."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any

from fsdp_core.doctor.child import Answer, ask
from fsdp_core.doctor.environment import environment_variables
from fsdp_core.plugins.contract import CONTRACT_VERSION, core_requirements, has_upper_bound
from fsdp_core.plugins.discovery import SLOW, error_text, installed_plugins, provider_of

__all__ = ["gather"]

_PACKAGES = (
    *("fsdp-core", "torch", "lightning", "pytorch-lightning", "lightning-fabric", "torch-xla"),
    *("fsdp-fsdp2", "fsdp-cuda-native", "fsdp-xla", "pluggy", "safetensors", "fsspec", "numpy"),
)


def gather(seconds: float) -> dict[str, Any]:
    """Gather all facts; never raises.

    Args:
        seconds: The time limit for each plugin, torch and Lightning.

    Returns:
        Plain data by subject. What could not be found out is in ``"failed"``: an error by subject.
    """
    parts: dict[str, Callable[[], Any]] = {
        "torch": lambda: _ask_child("torch", "torch_child", seconds),
        "lightning": lambda: _ask_child("lightning", "lightning_child", seconds),
        "device_packages": _device_packages,
        "machine": _machine,
        "versions": _versions,
        "environment": environment_variables,
    }
    facts: dict[str, Any] = {"contract": ".".join(map(str, CONTRACT_VERSION)), "failed": {}}
    # Plugins first, alone, so that the measured time is theirs.
    _note(facts, {"plugins": lambda: _plugins(seconds)})
    _note(facts, parts)
    if any(_is_slow(plugin) for plugin in facts["plugins"] or ()):
        _note(facts, {"plugins": lambda: [_retry_if_slow(plugin, seconds) for plugin in facts["plugins"]]})
    return facts


def _note(facts: dict[str, Any], parts: dict[str, Callable[[], Any]]) -> None:
    """Gather some facts in parallel."""
    with ThreadPoolExecutor(len(parts)) as pool:
        pending = {name: pool.submit(part) for name, part in parts.items()}
    for name, future in pending.items():
        try:
            facts[name] = future.result()
        except Exception as error:
            facts[name] = None
            facts["failed"][name] = error_text(error)


def _plugins(seconds: float) -> list[dict[str, Any]]:
    entry_points = installed_plugins()
    with ThreadPoolExecutor((os.cpu_count() or 1) + 2) as pool:  # a plugin or two may hang
        return list(pool.map(lambda entry_point: _plugin(entry_point, seconds), entry_points))


def _is_slow(plugin: dict[str, Any]) -> bool:
    return (plugin["seconds"] or 0) >= SLOW


def _retry_if_slow(plugin: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The facts of a plugin, or, if it was slow, of the faster of two loads.

    The second load finds files in the page cache, and does not compete with the other plugins, which were loaded in
    parallel the first time, nor with torch and Lightning.
    """
    if not _is_slow(plugin):
        return plugin
    again = _load_plugin(plugin, seconds)
    return again if again["seconds"] < plugin["seconds"] else plugin


def _plugin(entry_point: Any, seconds: float) -> dict[str, Any]:
    provider = provider_of(entry_point)
    requirements = core_requirements(entry_point.dist)
    facts: dict[str, Any] = {
        "name": entry_point.name,
        "module": entry_point.value,
        "package": provider.name,
        "version": provider.version,
        "requires_core": ", ".join(str(requirement.specifier) for requirement in requirements)
        if requirements
        else None,
        "bounded": has_upper_bound(requirements),
        "seconds": None,
        "error": None,
        "remedy": f"pip uninstall {provider.name}",
        "complaints": [],
        "strategies": [],
    }
    return _load_plugin(facts, seconds)


def _load_plugin(plugin: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The facts of a plugin after loading it in a separate process."""
    answer = ask("plugin_child", plugin["name"], plugin["module"], plugin["package"], seconds=seconds)
    if not answer.data:
        plugin = {**plugin, "error": f"the process that loads it {answer.failure}"}
    return {**plugin, "at_exit": _at_exit(answer), **answer.data}


def _at_exit(answer: Answer) -> str | None:
    """What went wrong when a process exited after it had answered."""
    if not answer.data or (answer.status == 0 and not answer.stderr_at_exit.strip()):
        return None
    if answer.status == 0:
        return f"the process that loads it ends with: {answer.stderr_at_exit.strip().splitlines()[-1]}"
    return f"the process that loads it {answer.failure}"


def _ask_child(package: str, child: str, seconds: float) -> dict[str, Any]:
    try:
        installed = find_spec(package) is not None
    except (ImportError, ValueError):
        installed = False
    if not installed:
        return {"installed": False, "error": None}
    answer = ask(child, seconds=seconds)
    if not answer.data.get("done"):
        answer.data["error"] = f"the process that imports it {answer.failure}"
    return {"installed": True, **answer.data}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
        except Exception as error:  # damaged metadata
            versions[package] = f"unknown ({error_text(error)})"
    return versions


def _device_packages() -> list[str]:
    """The packages but ours that torch loads when it is imported: they register a kind of device, as a rule."""
    providers = {provider_of(entry_point) for entry_point in entry_points(group="torch.backends")}
    return sorted(f"{provider.name} {provider.version}" for provider in providers if provider.name != "fsdp-core")


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable,
        "memory": _memory(),
        "nvidia_driver": _nvidia_driver(),
        "tpu_files": sorted(glob("/dev/accel[0-9]*") + glob("/dev/vfio/[0-9]*")),
    }


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _nvidia_driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error_text(error)}"
    return ", ".join(dict.fromkeys(done.stdout.split())) or None
