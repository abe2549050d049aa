"""``strategy="xla_fsdp_spmd"`` for the Trainer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from fsdp_xla.lightning.trainer_on_xla import TrainerOnXLA
from fsdp_xla.spmd.constructor import XLASPMDRanks
from fsdp_xla.spmd.options import LEFT_OUT

__all__ = ["XLASPMDStrategy"]


class XLASPMDStrategy(XLASPMDRanks, TrainerOnXLA):
    """Shards a LightningModule with torch_xla's SPMD: one process drives all XLA devices of the host.

    ``Trainer(strategy="xla_fsdp_spmd", devices=4)`` is this class with its defaults. ``devices`` is the number of
    devices of the host. On the CPU, where XLA can create any number of them, ``CPU_NUM_DEVICES`` is set to it.

    There is one rank, so a batch of the dataloader is a global batch: its tensors are sharded along their first
    dimension, and each device gets a part. If the number of devices doesn't divide the number of rows, as in the last
    batch of an epoch, XLA pads it without affecting results. But each new size is a new program to compile, so prefer
    ``drop_last=True``.

    Example:
        >>> strategy = XLASPMDStrategy(tensor_parallel_size=2, tensor_plan={"*.up.weight": 0})
        >>> strategy.num_processes
        1
    """

    positional: ClassVar[Sequence[str]] = ("accelerator", "parallel_devices", "checkpoint_io", "precision_plugin")
    left_out: ClassVar[Collection[str]] = (*LEFT_OUT, "precision")

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self._shard_batch(super().batch_to_device(batch, device, dataloader_idx))

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self.backend.first_steps.replace_initial_zeros(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
