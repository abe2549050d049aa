"""Compares what a Trainer or Fabric is told about hosts and devices with what the launcher has started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from fsdp_core.device_names import VISIBILITY
from fsdp_core.errors import ShardingError

__all__ = ["check_launched", "facts_of_visibility", "ranks_on_host"]


@dataclass(frozen=True)
class _Launcher:
    """A launcher, and the environment variables in which its processes find numbers, if any.

    Attributes:
        name: Its name.
        ranks_variable: The variable with the number of ranks on a host.
        hosts_variable: The variable with the number of hosts.
    """

    name: str
    ranks_variable: str = ""
    hosts_variable: str = ""


_LAUNCHERS: dict[type[ClusterEnvironment], _Launcher] = {
    TorchElasticEnvironment: _Launcher("torchrun", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    SLURMEnvironment: _Launcher("SLURM", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
}


def check_launched(environment: ClusterEnvironment | None, devices: int, num_nodes: int) -> None:
    """Refuse numbers of devices and hosts that a launcher contradicts, before any rank waits for another.

    Args:
        environment: How Lightning knows the launcher.
        devices: The ranks on a host, as the user says.
        num_nodes: The hosts, as the user says.

    Raises:
        ShardingError: The launcher has started other numbers of ranks. The message says what to write.
    """
    if environment is None or isinstance(environment, LightningEnvironment):
        return  # Lightning starts the ranks itself, or numbers them by ``devices`` and ``num_nodes``
    if not environment.creates_processes_externally:
        return
    try:
        world_size = environment.world_size()
    except (KeyError, ValueError, NotImplementedError, RuntimeError):  # this launcher does not say
        return
    launcher = _LAUNCHERS.get(type(environment), _Launcher(type(environment).__name__))
    ranks_per_host, hosts = _read_number(launcher.ranks_variable), _read_number(launcher.hosts_variable)
    agrees = devices * num_nodes == world_size and ranks_per_host in (None, devices) and hosts in (None, num_nodes)
    if agrees or world_size < 1:
        return
    if ranks_per_host is None and hosts is None:
        correction = f"numbers whose product is {world_size}"
    else:
        hosts = hosts or max(world_size // (ranks_per_host or world_size), 1)
        correction = f"devices={ranks_per_host or world_size // hosts}, num_nodes={hosts}"
    distribution = ""
    if ranks_per_host is not None and hosts is not None:
        distribution = f", {ranks_per_host} on each of {hosts} host{'s' * (hosts > 1)}"
    raise ShardingError(
        f"devices={devices} and num_nodes={num_nodes} ask for {devices * num_nodes} rank"
        f"{'s' * (devices * num_nodes > 1)}, {devices} on each host, and {launcher.name} has started {world_size} rank"
        f"{'s' * (world_size > 1)}{distribution}.\n"
        f"Write {correction}{_suggest_variables(launcher)}; or start other ranks."
    )


def ranks_on_host() -> tuple[str, int] | None:
    """The launcher that has started this process, and how many ranks on this host; ``None`` if none says that."""
    for environment, launcher in _LAUNCHERS.items():
        ranks = _read_number(launcher.ranks_variable) if environment.detect() else None
        if ranks is not None:
            return launcher.name, ranks
    return None


def facts_of_visibility(kind: str) -> dict[str, str]:
    """The variable that hides devices of a kind, with its value, to compare between ranks of one host.

    A rank takes the device of its local rank among those that it sees: two that see others could take the same one.
    """
    variable = VISIBILITY.get(kind)
    return {} if variable is None else {f"environment variable {variable}": os.environ.get(variable, "not set")}


def _read_number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None


def _suggest_variables(launcher: _Launcher) -> str:
    if not launcher.ranks_variable or launcher.ranks_variable not in os.environ:
        return ""
    devices, num_nodes = (f'int(os.environ["{name}"])' for name in (launcher.ranks_variable, launcher.hosts_variable))
    return f" (in a script for any number: devices={devices}, num_nodes={num_nodes})"
