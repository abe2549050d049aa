"""The options of ``strategy="xla_fsdp_spmd"``, and one process for all devices of the host: one rank to Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_core.lightning import LightningOptions, ShardedStrategy, check_devices, takes
from fsdp_core.sharding import ShardingOptions
from fsdp_xla.lightning.placement import OnXLADevices
from fsdp_xla.options import SPMD_ACCEPTED_NOOPS, SPMD_MIGRATION_HINTS
from fsdp_xla.spmd.backend import XLASPMDBackend
from fsdp_xla.spmd.options import XLASPMDOptions
from fsdp_xla.spmd.runtime import XLASPMDRuntime

__all__ = ["XLASPMDRanks"]


@dataclass(frozen=True, kw_only=True)
class _Options(XLASPMDOptions, LightningOptions): ...


class XLASPMDRanks(OnXLADevices, ShardedStrategy):
    """The half of ``"xla_fsdp_spmd"`` that is the same under Trainer and Fabric. One process drives all devices."""

    strategy_name = "xla_fsdp_spmd"
    options_class: ClassVar[type[ShardingOptions]] = _Options
    backend_class = XLASPMDBackend
    migration_hints: ClassVar = SPMD_MIGRATION_HINTS
    accepted_noops: ClassVar = SPMD_ACCEPTED_NOOPS

    options: XLASPMDOptions
    backend: XLASPMDBackend
    runtime: XLASPMDRuntime
    num_nodes: int

    @overload
    @takes(_Options)
    def __init__(self, **options: Any) -> None: ...
    @overload
    def __init__(self, first: object, /, *positional: Any, **options: Any) -> None: ...
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)

    def new_runtime(self) -> XLASPMDRuntime:
        return XLASPMDRuntime(self.options.tensor_parallel_size)

    @property
    def num_processes(self) -> int:
        """1, whatever the number of devices: Lightning sees one rank, and every batch is a global batch."""
        return 1

    @property
    def root_device(self) -> torch.device:
        """The device that represents all devices."""
        return XLASPMDRuntime.device

    def _configure_launcher(self) -> None:
        """Check the devices. There is nothing to launch."""
        strategy: Any = self
        check_devices(self.strategy_name, self.backend, self.parallel_devices, strategy.shard_precision)

    def setup_environment(self) -> None:
        """Turn SPMD on."""
        self.runtime.expect(len(self.parallel_devices or ()), self.num_nodes)
        super().setup_environment()  # type: ignore[misc]  # of core's adapter, which comes next

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the decision: there is one rank. Lightning would compute it on the device, and wait for it."""
        return decision

    def _shard_batch(self, batch: Any) -> Any:
        """Shard each tensor of a batch that is on the devices along its first dimension."""
        return apply_to_collection(batch, Tensor, self.backend.shard_batch)
