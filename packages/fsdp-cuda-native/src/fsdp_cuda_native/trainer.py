"""``strategy="fsdp_native"`` for the Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_cuda_native.constructor import FURTHER_BY_POSITION, NativeStrategy

__all__ = ["DDPFullyShardedNativeStrategy"]


class DDPFullyShardedNativeStrategy(NativeStrategy, ShardedTrainerStrategy):
    """Shards a LightningModule with torch's ``FullyShardedDataParallel``, on CUDA or on the CPU.

    ``Trainer(strategy="fsdp_native")`` is this class with its defaults.

    Example:
        >>> strategy = DDPFullyShardedNativeStrategy(sharding_strategy="SHARD_GRAD_OP")
        >>> strategy.options.strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    positional: ClassVar[Sequence[str]] = (*ShardedTrainerStrategy.positional, *FURTHER_BY_POSITION)
