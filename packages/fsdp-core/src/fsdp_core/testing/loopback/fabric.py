"""``strategy="loopback"`` for Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Literal, Never

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_core.testing.loopback.backend import LoopbackBackend

__all__ = ["LoopbackFabricStrategy"]


class LoopbackFabricStrategy(ShardedFabricStrategy):
    """Shards parameters by hand, on the CPU.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: As in Lightning.
        state_dict_type: ``"sharded"`` for checkpoint folders, ``"full"`` for one file.
        timeout: How long a collective may wait for its peers.
        async_save: Whether a save returns when the state is copied, and the checkpoint is written in the background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.

    Raises:
        UnsupportedCapabilityError: An option is unknown.
    """

    #: The name that users type, and the backend behind it; tests give others.
    called: ClassVar[str] = "loopback"
    backend_class: ClassVar[type[LoopbackBackend]] = LoopbackBackend

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        timeout: timedelta | None = None,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__(
            self.backend_class(),
            strategy_name=self.called,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
            **unknown,
        )
