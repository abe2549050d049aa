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

_HOSTS_SHOWN = 4
_RANKS_SHOWN = 8


def versions_of(*classes: type) -> dict[str, str]:
    """The versions of torch, and of the packages that define these classes and their bases.

    Args:
        *classes: Such as a strategy's and its backend's.

    Example:
        >>> versions_of(torch.nn.Linear).keys()
        dict_keys(['torch'])
    """
    modules = sorted({base.__module__.partition(".")[0] for one in classes for base in one.__mro__} - {"torch"})
    found = {"torch": str(torch.__version__)}
    for name in modules:
        told = _version_of(name)
        if told is not None:
            found[name] = told
    return found


def _version_of(module: str) -> str | None:
    if module in sys.stdlib_module_names:
        return None
    told = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(told, str):
        return told
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
    told = None if gathered is None else _told(gathered)
    raise ShardingError(runtime.broadcast_object(told))


def _told(by_rank: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    names = dict.fromkeys(name for _, versions in by_rank for name in versions)
    lines, first = [], ""
    for name in names:
        where: dict[str | None, dict[str, list[int]]] = {}
        for rank, (host, versions) in enumerate(by_rank):
            where.setdefault(versions.get(name), {}).setdefault(host, []).append(rank)
        if len(where) > 1:
            has = "; ".join(f"{one or 'not installed'} on {_places(hosts)}" for one, hosts in where.items())
            lines.append(f"  {name}: {has}")
            first = first or f"{name.replace('_', '-')}=={by_rank[0][1].get(name) or next(filter(None, where))}"
    return (
        "the ranks do not have the same packages, and would not compute and save the same:\n" + "\n".join(lines) + "\n"
        f"Install the same on every host, such as: pip install {first}"
    )


def _places(hosts: Mapping[str, Sequence[int]]) -> str:
    shown = [
        f"{host} (rank {', '.join(map(str, ranks[:_RANKS_SHOWN]))}{', …' if len(ranks) > _RANKS_SHOWN else ''})"
        for host, ranks in list(hosts.items())[:_HOSTS_SHOWN]
    ]
    more = f" and {len(hosts) - _HOSTS_SHOWN} more hosts" if len(hosts) > _HOSTS_SHOWN else ""
    return ", ".join(shown) + more
