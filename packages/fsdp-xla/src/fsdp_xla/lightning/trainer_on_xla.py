"""The part of the XLA strategies for the Trainer that is the same for ranks and for SPMD."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_xla.lightning.batch_shapes import BatchShapes, stage_of
from fsdp_xla.lightning.host_metrics import compute_metrics_on_host, count_on_host, log_numbers_on_host

__all__ = ["TrainerOnXLA"]


class TrainerOnXLA(ShardedTrainerStrategy):
    """Computes metrics on the host, where no program is compiled for them, and warns of changing batch shapes."""

    @cached_property
    def _batch_shapes(self) -> BatchShapes:
        return BatchShapes()

    def setup(self, trainer: pl.Trainer) -> None:
        compute_metrics_on_host(trainer)
        super().setup(trainer)
        assert self.lightning_module is not None
        log_numbers_on_host(self.lightning_module)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("log", None)  # see log_numbers_on_host
        super().teardown()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(count_on_host(tensor), group, reduce_op)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._batch_shapes.note(stage_of(self.lightning_module), batch)
        return super().batch_to_device(batch, device, dataloader_idx)
