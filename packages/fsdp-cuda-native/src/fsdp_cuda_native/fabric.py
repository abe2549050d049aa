"""``strategy="fsdp_native"`` for Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_cuda_native.constructor import NativeOptions

__all__ = ["NativeFSDPStrategy"]


class NativeFSDPStrategy(NativeOptions, ShardedFabricStrategy):
    """Shards modules with torch's ``FullyShardedDataParallel`` under Fabric, on CUDA or on the CPU.

    ``Fabric(strategy="fsdp_native")`` is this class with its defaults.

    Example:
        >>> strategy = NativeFSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
        >>> strategy.backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *own: Any,
        **options: Any,
    ) -> None:
        super().__init__(
            *own,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            **options,
        )
