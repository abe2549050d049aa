"""``strategy="fsdp_native"`` for Fabric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_cuda_native.constructor import FURTHER_BY_POSITION, NativeStrategy

__all__ = ["NativeFSDPStrategy"]


class NativeFSDPStrategy(NativeStrategy, ShardedFabricStrategy):
    """Shards modules with torch's ``FullyShardedDataParallel`` under Fabric, on CUDA or on the CPU.

    ``Fabric(strategy="fsdp_native")`` is this class with its defaults.

    Example:
        >>> strategy = NativeFSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
        >>> strategy.options.strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    positional: ClassVar[Sequence[str]] = (*ShardedFabricStrategy.positional, *FURTHER_BY_POSITION)
