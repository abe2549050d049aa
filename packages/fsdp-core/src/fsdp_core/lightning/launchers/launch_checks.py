"""Compares what a Trainer or Fabric is told about hosts and devices with what the launcher has started."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from fsdp_core.device_names import VISIBILITY
from fsdp_core.errors import ShardingError

__all__ = ["check_launched", "facts_of_visibility", "ranks_on_host"]

#: By Lightning's class for a launcher: its name, and the variables with the numbers of ranks per host and of hosts.
_VARIABLES: dict[type[ClusterEnvironment], tuple[str, str, str]] = {
    TorchElasticEnvironment: ("torchrun", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    SLURMEnvironment: ("SLURM", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
}


def check_launched(environment: ClusterEnvironment | None, devices: int, num_nodes: int) -> None:
    """Refuse numbers of devices and hosts that a launcher contradicts, before any rank waits for another.

    Args:
        environment: How Lightning knows the launcher.
        devices: The ranks on a host, as the user says.
        num_nodes: The hosts, as the user says.

    Raises:
        ShardingError: The launcher has started others. The message says what to write.
    """
    if environment is None or isinstance(environment, LightningEnvironment):
        return  # Lightning starts the ranks itself, or numbers them by ``devices`` and ``num_nodes``
    if not environment.creates_processes_externally:
        return
    try:
        world = environment.world_size()
    except (KeyError, ValueError, NotImplementedError, RuntimeError):  # this launcher does not say
        return
    launcher, ranks_variable, hosts_variable = _VARIABLES.get(type(environment), (type(environment).__name__, "", ""))
    ranks_per_host, hosts = _number(ranks_variable), _number(hosts_variable)
    agrees = devices * num_nodes == world and ranks_per_host in (None, devices) and hosts in (None, num_nodes)
    if agrees or world < 1:
        return
    if ranks_per_host is None and hosts is None:
        correction = f"numbers whose product is {world}"
    else:
        hosts = hosts or max(world // (ranks_per_host or world), 1)
        correction = f"devices={ranks_per_host or world // hosts}, num_nodes={hosts}"
    started = f"{world} rank{'s' if world > 1 else ''}"
    per_host = (
        ""
        if ranks_per_host is None or hosts is None
        else f", {ranks_per_host} on each of {hosts} host{'s' * (hosts > 1)}"
    )
    raise ShardingError(
        f"devices={devices} and num_nodes={num_nodes} ask for {devices * num_nodes} rank"
        f"{'s' * (devices * num_nodes > 1)}, {devices} on each host, and {launcher} has started {started}{per_host}.\n"
        f"Write {correction}{_suggest_variables(ranks_variable, hosts_variable)}; or start other ranks."
    )


def ranks_on_host() -> tuple[str, int] | None:
    """The launcher that has started this process, and how many ranks on this host; ``None`` if none says that."""
    for environment, (launcher, ranks_variable, _) in _VARIABLES.items():
        ranks = _number(ranks_variable) if environment.detect() else None
        if ranks is not None:
            return launcher, ranks
    return None


def facts_of_visibility(kind: str) -> dict[str, str]:
    """The variable that hides devices of a kind, with its value, to compare between ranks of one host.

    A rank takes the device of its local rank among those that it sees: two that see others could take the same one.
    """
    variable = VISIBILITY.get(kind)
    return {} if variable is None else {f"environment variable {variable}": os.environ.get(variable, "not set")}


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None


def _suggest_variables(devices: str, hosts: str) -> str:
    if not devices or devices not in os.environ:
        return ""
    return f' (in a script for any number: devices=int(os.environ["{devices}"]), num_nodes=int(os.environ["{hosts}"]))'
