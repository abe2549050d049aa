"""Checks, when ranks have met, that all hosts have the same packages."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version

import torch

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = ["check_same_packages", "versions_of"]

_MAX_HOSTS = 4
_MAX_RANKS = 8


def versions_of(*classes: type) -> dict[str, str]:
    """The versions of torch, and of the packages that define these classes and their bases.

    Args:
        *classes: Such as a strategy's and its backend's.

    Example:
        >>> versions_of(torch.nn.Linear).keys()
        dict_keys(['torch'])
    """
    modules = sorted({base.__module__.partition(".")[0] for cls in classes for base in cls.__mro__} - {"torch"})
    versions = {"torch": str(torch.__version__)}
    for name in modules:
        module_version = _version_of(name)
        if module_version is not None:
            versions[name] = module_version
    return versions


def _version_of(module: str) -> str | None:
    if module in sys.stdlib_module_names:
        return None
    module_version = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(module_version, str):
        return module_version
    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        names = packages_distributions().get(module)
        return version(names[0]) if names else None


def check_same_packages(runtime: Runtime, versions: Mapping[str, str]) -> None:
    """Raise on every rank if two ranks have different versions. All ranks must call it.

    If they agree, each rank takes part in one broadcast and one sum.

    Args:
        runtime: The ranks.
        versions: By name of a package, what this rank has of it.

    Raises:
        ShardingError: Two ranks differ. The message names hosts, ranks and versions.
    """
    own = dict(versions)
    differs = own != runtime.broadcast_object(own)
    if not runtime.total([differs])[0]:
        return
    gathered = runtime.gather_objects_to((socket.gethostname(), own))
    message = None if gathered is None else _describe_differences(gathered)
    raise ShardingError(runtime.broadcast_object(message))


def _describe_differences(by_rank: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    names = dict.fromkeys(name for _, versions in by_rank for name in versions)
    lines = []
    example = ""
    for name in names:
        ranks_by_version: dict[str | None, dict[str, list[int]]] = {}
        for rank, (host, versions) in enumerate(by_rank):
            ranks_by_version.setdefault(versions.get(name), {}).setdefault(host, []).append(rank)
        if len(ranks_by_version) > 1:
            description = "; ".join(
                f"{package_version or 'not installed'} on {_describe_hosts(hosts)}"
                for package_version, hosts in ranks_by_version.items()
            )
            lines.append(f"  {name}: {description}")
            version_to_install = by_rank[0][1].get(name) or next(filter(None, ranks_by_version))
            example = example or f"{name.replace('_', '-')}=={version_to_install}"
    return (
        "the ranks do not have the same packages, and would not compute and save the same:\n" + "\n".join(lines) + "\n"
        f"Install the same on every host, such as: pip install {example}"
    )


def _describe_hosts(hosts: Mapping[str, Sequence[int]]) -> str:
    descriptions = [
        f"{host} (rank {', '.join(map(str, ranks[:_MAX_RANKS]))}{', …' if len(ranks) > _MAX_RANKS else ''})"
        for host, ranks in list(hosts.items())[:_MAX_HOSTS]
    ]
    more = f" and {len(hosts) - _MAX_HOSTS} more hosts" if len(hosts) > _MAX_HOSTS else ""
    return ", ".join(descriptions) + more
