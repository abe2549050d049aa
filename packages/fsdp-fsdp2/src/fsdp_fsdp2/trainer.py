"""``strategy="fsdp2"`` for the Trainer."""

from __future__ import annotations

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_fsdp2.constructor import FSDP2Options

__all__ = ["FSDP2Strategy"]


class FSDP2Strategy(FSDP2Options, ShardedTrainerStrategy):
    """Shards a LightningModule with torch's ``fully_shard``, on CUDA or on the CPU.

    ``Trainer(strategy="fsdp2")`` is this class with its defaults.

    Example:
        >>> strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
        >>> strategy.backend.cpu_offload
        True
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.device_mesh  # its public property is read-only
