"""Rank numbers and launching, for the XLA strategies of Trainer and Fabric."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NoReturn

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import nn

from fsdp_core import Sharded, StrategyUnavailableError, UnsupportedCapabilityError
from fsdp_core.lightning import set_rank_zero
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.cpu_ranks import uses_cpu_devices
from fsdp_xla.lightning.placement import OnXLADevices
from fsdp_xla.lightning.private import meet_at_infinite_barriers
from fsdp_xla.ranks.launch import check_cpu_devices
from fsdp_xla.torch_xla_private import devices as xla

__all__ = ["XLADeviceRanks", "XLARanks", "refuse_synced_norms"]


class XLARanks(ClusterEnvironment):
    """Ranks as numbered by XLA; before they are started, rank 0 of the requested world size."""

    def __init__(self) -> None:
        self._requested_size = 1

    @property
    def creates_processes_externally(self) -> bool:
        return False

    @property
    def main_address(self) -> str:
        # On a TPU slice, XLA lists the hosts.
        return os.environ.get("MASTER_ADDR") or os.environ.get("TPU_WORKER_HOSTNAMES", "127.0.0.1").split(",")[0]

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "29531"))

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        rank_here = xla.rank_here()
        return self._requested_size if rank_here is None else rank_here.world_size

    def set_world_size(self, size: int) -> None:
        self._requested_size = size

    def global_rank(self) -> int:
        rank_here = xla.rank_here()
        return 0 if rank_here is None else rank_here.rank

    def set_global_rank(self, rank: int) -> None:
        """XLA numbers the ranks."""

    def local_rank(self) -> int:
        rank_here = xla.rank_here()
        return 0 if rank_here is None else rank_here.local_rank

    def node_rank(self) -> int:
        rank_here = xla.rank_here()
        return 0 if rank_here is None else rank_here.host


class XLADeviceRanks(OnXLADevices):
    """Mixin for strategies whose ranks are XLA devices. Must precede core's adapter in the bases."""

    runtime: XLARuntime
    cluster_environment: Any
    _launcher: Any
    launcher_class: ClassVar[Any]
    num_processes: int
    num_nodes: int
    global_rank: int
    world_size: int

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if self.runtime.device.type == "xla":
            return self.runtime.device
        if self.is_in_a_rank:
            return xla.default_device()
        return (self.parallel_devices or [torch.device("xla", 0)])[0]

    @property
    def is_in_a_rank(self) -> bool:
        """Whether this is one of the ranks, as opposed to the process or thread that starts them."""
        return xla.rank_here() is not None

    def _number_ranks(self) -> None:
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_here = xla.rank_here()
        requested = self.num_nodes * self.num_processes
        if rank_here is not None and rank_here.world_size != requested:
            raise StrategyUnavailableError(
                f"num_nodes={self.num_nodes} and devices={self.num_processes} ask for {requested} ranks, and XLA has "
                f"{rank_here.world_size}.\nWrite the number of hosts of the TPU slice, and that of one host's devices."
            )
        thread_communicator = getattr(xla.this_thread, "communicator", None)
        # Threads share the global that is set here; where several are ranks, lockstep() replaces it.
        if thread_communicator is None or thread_communicator.world_size == 1:
            set_rank_zero(0 if rank_here is None else rank_here.rank)

    def _configure_launcher(self) -> None:
        if uses_cpu_devices():
            check_cpu_devices(self.num_processes)
            if self.num_nodes != 1:
                raise UnsupportedCapabilityError(
                    f"num_nodes={self.num_nodes} can't be used on XLA's CPU devices, whose ranks are threads of one "
                    "process.\nLeave num_nodes out, and write devices= for the number of ranks."
                )
        if self.is_in_a_rank:
            return  # a rank builds its own Trainer or Fabric: ranks are already running
        if self.num_processes > 1 or self.num_nodes > 1:
            self._launcher = self.launcher_class(self.num_processes)

    def _join_world(self) -> None:
        super()._join_world()  # type: ignore[misc]  # of core's adapter, which comes after this class
        if self.is_in_a_rank:
            meet_at_infinite_barriers(self.runtime.barrier)
        self.runtime.barrier()  # so that no rank draws before all have seeded the generator that threads share

    def _shard(self, module: nn.Module) -> Sharded:
        if self.world_size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            refuse_synced_norms("nn.SyncBatchNorm")
        sharded: Sharded = super()._shard(module)  # type: ignore[misc]  # as above
        return sharded

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank. Arguments are ignored, as in Lightning's XLA strategies."""
        self.runtime.barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any rank, decided ``True``; exchanged on the host."""
        decisions = self.runtime.gather_objects(bool(decision))
        return bool(min(decisions)) if all else bool(max(decisions))


def refuse_synced_norms(requested: str) -> NoReturn:
    """Refuse synchronized batch norms: torch's would silently compute the statistics of this rank alone."""
    raise UnsupportedCapabilityError(
        f"{requested} can't be used with several ranks of 'xla_fsdp': its statistics are exchanged through "
        "torch.distributed, which does not know XLA's ranks.\n"
        "Write strategy='xla_fsdp_spmd', where every batch is the global one, or leave it out."
    )
