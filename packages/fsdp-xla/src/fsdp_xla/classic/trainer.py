"""``strategy="xla_fsdp"`` for the Trainer.

``MpDeviceLoader`` is not used. It prefetches batches, which an exact resume could not account for. Lightning's own
transfer at each step is sufficient on the CPU, and unmeasured on a TPU.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_xla.classic.constructor import XLAFSDPOptions
from fsdp_xla.lightning.batch_shapes import BatchShapes, stage_of
from fsdp_xla.lightning.cluster_environment import refuse_synced_norms
from fsdp_xla.lightning.host_metrics import (
    compute_metrics_on_host,
    count_on_host,
    log_numbers_on_host,
    reduce_metrics_over,
)
from fsdp_xla.lightning.launchers import TrainerXLALauncher
from fsdp_xla.torch_xla_private.devices import sync

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(XLAFSDPOptions, ShardedTrainerStrategy):
    """Shards a LightningModule with torch_xla's ``XlaFullyShardedDataParallel``, one rank per XLA device.

    ``Trainer(strategy="xla_fsdp")`` is this class with its defaults.
    """

    launcher_class: ClassVar[Any] = TrainerXLALauncher

    def __init__(self, *common: Any, **options: Any) -> None:
        self._batch_shapes = BatchShapes()
        super().__init__(*common, **options)

    def _configure_launcher(self) -> None:
        if self._layer_sync is not None and self.num_processes * self.num_nodes > 1:
            refuse_synced_norms("sync_batchnorm=True")
        super()._configure_launcher()

    def setup(self, trainer: pl.Trainer) -> None:
        compute_metrics_on_host(trainer)
        super().setup(trainer)
        assert self.lightning_module is not None
        log_numbers_on_host(self.lightning_module)
        reduce_metrics_over(self.runtime, self.lightning_module)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("log", None)  # see log_numbers_on_host
        super().teardown()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(count_on_host(tensor), group, reduce_op)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._batch_shapes.note(stage_of(self.lightning_module), batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with super().block_backward_sync():
            yield
        sync()  # otherwise the graph of the step would grow with each micro-batch

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.launcher is not None and not self.is_in_a_rank:
            raise UnsupportedCapabilityError(
                "trainer.save_checkpoint() was called outside the ranks, which ended with the fit, and their weights "
                "with them.\nSave while they run: with a ModelCheckpoint, or by trainer.save_checkpoint(path) in "
                "on_train_end() of the module or of a callback."
            )
        return super().lightning_module_state_dict()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self.sharded.reshard()
            sync()  # it may have taken no optimizer step, and the next one's graph would then continue this one
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self.backend.first_steps.of(optimizer):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        sync()
        return output

    def _eval_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        output = super()._eval_step(name, *args, **kwargs)
        sync()
        return output
