"""The options of ``strategy="xla_fsdp_spmd"``, and one process for all devices of the host: one rank to Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Never

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fsdp_core.lightning import StrategyOptions, check_devices
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.lightning.placement import OnXLADevices
from fsdp_xla.options import ALWAYS_IN_SPMD, INSTEAD_IN_SPMD
from fsdp_xla.spmd.backend import XLASPMDBackend
from fsdp_xla.spmd.runtime import XLASPMDRuntime

__all__ = ["XLASPMDOptions"]


class XLASPMDOptions(OnXLADevices, StrategyOptions):
    """Constructor of both strategies whose single process drives all devices, and what they share.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: As in Lightning; ``precision="bf16-mixed"`` given to Trainer or Fabric is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks
            repeated in ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes, a function ``module -> bool``, or ``"every_2"`` for every second repeated block, and so on.
        tensor_parallel_size: The number of devices that share one part of the batch and shard weights by
            ``tensor_plan``. It must divide the number of devices.
        tensor_plan: By pattern of parameter names (``*`` matches anything), the dimension to shard over these devices,
            such as ``{"*.mlp.up.weight": 0, "*.mlp.down.weight": 1}``. Other parameters are replicated on them.
        state_dict_type: ``"sharded"`` for checkpoint folders of shards, ``"full"`` for one file.
        async_save: Whether a save returns once the state is copied to host memory, and the checkpoint is written in the
            background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
    """

    backend: XLASPMDBackend
    runtime: XLASPMDRuntime
    num_nodes: int
    others_options: ClassVar = INSTEAD_IN_SPMD
    happens_anyway: ClassVar = ALWAYS_IN_SPMD

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        tensor_parallel_size: int = 1,
        tensor_plan: Mapping[str, int] | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        **unknown: Never,
    ) -> None:
        # not passed on: LightningCLI would take core's arguments for further options
        refuse_unknown_options("xla_fsdp_spmd", type(self), unknown, INSTEAD_IN_SPMD, always=ALWAYS_IN_SPMD)
        backend = XLASPMDBackend(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            tensor_plan=tensor_plan,
        )
        super().__init__(
            backend,
            accelerator,
            parallel_devices,
            None,
            checkpoint_io,
            precision,
            strategy_name="xla_fsdp_spmd",
            runtime=XLASPMDRuntime(tensor_parallel_size),
            state_dict_type=state_dict_type,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
        )

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
