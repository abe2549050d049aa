"""``strategy="xla_fsdp"`` for the Trainer.

``MpDeviceLoader`` is not used. It prefetches batches, which an exact resume could not account for. Lightning's own
transfer at each step is sufficient on the CPU, and unmeasured on a TPU.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch.optim import Optimizer

from fsdp_core import UnsupportedCapabilityError
from fsdp_xla.classic.constructor import XLAFSDPRanks
from fsdp_xla.lightning.cluster_environment import refuse_synced_norms
from fsdp_xla.lightning.host_metrics import reduce_metrics_over
from fsdp_xla.lightning.launchers import TrainerXLALauncher
from fsdp_xla.lightning.trainer_on_xla import TrainerOnXLA
from fsdp_xla.torch_xla_private.devices import sync

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(XLAFSDPRanks, TrainerOnXLA):
    """Shards a LightningModule with torch_xla's ``XlaFullyShardedDataParallel``, one rank per XLA device.

    ``Trainer(strategy="xla_fsdp")`` is this class with its defaults.
    """

    launcher_class: ClassVar[Any] = TrainerXLALauncher

    def _configure_launcher(self) -> None:
        if self._layer_sync is not None and self.num_processes * self.num_nodes > 1:
            refuse_synced_norms("sync_batchnorm=True")
        super()._configure_launcher()

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        reduce_metrics_over(self.runtime, self.lightning_module)

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
            sync()  # without an optimizer step, the graph of the next training_step would continue this one
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self.backend.first_steps.replace_initial_zeros(optimizer):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        sync()
        return output

    def _eval_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        output = super()._eval_step(name, *args, **kwargs)
        sync()
        return output
