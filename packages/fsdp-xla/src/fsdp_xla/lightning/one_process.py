"""The common part of both SPMD adapters: one process, a single rank to Lightning, for all devices of the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_core.lightning import StrategyOptions, check_devices
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.lightning.placement import OnXLADevices
from fsdp_xla.spmd.backend import XLASPMDBackend
from fsdp_xla.spmd.runtime import XLASPMDRuntime

__all__ = ["OneProcess"]


class OneProcess(OnXLADevices, StrategyOptions):
    """Mixin for strategies whose single process drives all devices. Must precede core's adapter in the bases.

    Its constructor takes the options of ``strategy="xla_fsdp_spmd"`` and passes the rest on to core's adapter.
    """

    backend: XLASPMDBackend
    runtime: XLASPMDRuntime
    num_nodes: int

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None,
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None,
        tensor_parallel_size: int,
        tensor_plan: Mapping[str, int] | None,
        **common: Any,
    ) -> None:
        backend = XLASPMDBackend(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            tensor_plan=tensor_plan,
        )
        runtime = XLASPMDRuntime(tensor_parallel_size)
        super().__init__(backend, strategy_name="xla_fsdp_spmd", runtime=runtime, **common)

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
        adapter: Any = self
        check_devices(self.strategy_name, self.backend, self.parallel_devices, adapter.shard_precision)

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
