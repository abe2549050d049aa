"""``strategy="xla_fsdp"`` for Fabric."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fsdp_core.lightning import ShardedFabricStrategy, reduce_op_name
from fsdp_xla.classic.constructor import XLAFSDPRanks
from fsdp_xla.lightning.launchers import FabricXLALauncher
from fsdp_xla.torch_xla_private.devices import sync

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(XLAFSDPRanks, ShardedFabricStrategy):
    """Shards modules with torch_xla's ``XlaFullyShardedDataParallel`` under Fabric, one rank per XLA device.

    ``Fabric(strategy="xla_fsdp")`` is this class with its defaults. With several devices, training must be a function
    that is passed to ``fabric.launch(train)``, which calls it on every rank.
    """

    launcher_class: ClassVar[Any] = FabricXLALauncher

    def all_reduce(self, output: Any, group: Any | None = None, reduce_op: Any = None) -> Any:
        """Reduce a tensor, in place, or a number over the ranks.

        Args:
            output: A tensor of the same shape on every rank, or a number. Anything else is returned unchanged.
            group: Ignored: all ranks take part.
            reduce_op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or torch's ``ReduceOp``; ``None`` is the sum, as in
                Lightning's strategy of this name.

        Returns:
            The reduced tensor, also for numbers. The mean of numbers is a float.
        """
        name = reduce_op_name("sum" if reduce_op is None else reduce_op)
        if isinstance(output, int | float):
            output = torch.tensor(float(output) if name == "mean" else output)
        return super().all_reduce(output, group, name)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self.backend.first_steps.replace_initial_zeros(optimizer):
            output = super().optimizer_step(optimizer, **kwargs)
        sync()
        return output
