"""``strategy="xla_fsdp_spmd"`` for Fabric."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from lightning.fabric.utilities.apply_func import move_data_to_device

from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_xla.spmd.constructor import XLASPMDRanks
from fsdp_xla.spmd.options import LEFT_OUT

__all__ = ["XLASPMDStrategy"]


class XLASPMDStrategy(XLASPMDRanks, ShardedFabricStrategy):
    """Shards modules with torch_xla's SPMD: one process drives all XLA devices of the host.

    ``Fabric(strategy="xla_fsdp_spmd", devices=4)`` is this class with its defaults. ``devices`` is the number of
    devices of the host. On the CPU, where XLA can create any number of them, ``CPU_NUM_DEVICES`` is set to it.

    There is one rank, so a batch of the dataloader is a global batch: the dataloaders that ``fabric.setup_dataloaders``
    returns shard its tensors along their first dimension, and each device gets a part. If the number of devices doesn't
    divide the number of rows, as in the last batch of an epoch, XLA pads it without affecting results. But each new
    size is a new program to compile, so prefer ``drop_last=True``.

    Example:
        >>> strategy = XLASPMDStrategy(tensor_parallel_size=2, tensor_plan={"*.up.weight": 0})
        >>> strategy.num_processes
        1
    """

    positional: ClassVar[Sequence[str]] = ("accelerator", "parallel_devices", "checkpoint_io", "precision")
    left_out: ClassVar[Collection[str]] = (*LEFT_OUT, "precision_plugin")

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self.backend.first_steps.replace_initial_zeros(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make a dataloader yield batches on the devices. Fabric's own wrapper would replicate each tensor."""
        dataloader = super().process_dataloader(dataloader)
        loader_class = type(dataloader)
        if not hasattr(loader_class, "gives_shards"):
            # the same object, because core tracks its position; its class determines how it is iterated
            iterate = {"__iter__": lambda loader: map(loader.batch_to_devices, loader_class.__iter__(loader))}
            dataloader.__class__ = type(loader_class.__name__, (loader_class,), {**iterate, "gives_shards": True})
        dataloader.batch_to_devices = self.batch_to_devices
        return dataloader

    def batch_to_devices(self, batch: Any) -> Any:
        """Move a batch to the devices, each tensor sharded along its first dimension."""
        return self._shard_batch(move_data_to_device(batch, self.root_device))
