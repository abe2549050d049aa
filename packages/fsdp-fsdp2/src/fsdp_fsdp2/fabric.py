"""``strategy="fsdp2"`` for Fabric."""

from __future__ import annotations

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_fsdp2.constructor import FSDP2Options

__all__ = ["FSDP2Strategy"]


class FSDP2Strategy(FSDP2Options, ShardedFabricStrategy):
    """Shards modules with torch's ``fully_shard``, on CUDA or on the CPU.

    ``Fabric(strategy="fsdp2")`` is this class with its defaults.

    Example:
        >>> strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
        >>> strategy.backend.cpu_offload
        True
    """
