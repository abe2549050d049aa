"""``strategy="fsdp_native"`` for the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_cuda_native.constructor import NativeOptions

__all__ = ["DDPFullyShardedNativeStrategy"]


class DDPFullyShardedNativeStrategy(NativeOptions, ShardedTrainerStrategy):
    """Shards a LightningModule with torch's ``FullyShardedDataParallel``, on CUDA or on the CPU.

    ``Trainer(strategy="fsdp_native")`` is this class with its defaults.

    Example:
        >>> strategy = DDPFullyShardedNativeStrategy(sharding_strategy="SHARD_GRAD_OP")
        >>> strategy.backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *own: Any,
        **options: Any,
    ) -> None:
        super().__init__(
            *own,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **options,
        )
