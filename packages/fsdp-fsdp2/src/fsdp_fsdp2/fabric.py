"""``strategy="fsdp2"`` for Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fsdp_core import ShardingError
from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_fsdp2.constructor import FSDP2Ranks
from fsdp_fsdp2.tensor_parallel.loss import with_parallel_loss

__all__ = ["FSDP2Strategy"]


class FSDP2Strategy(FSDP2Ranks, ShardedFabricStrategy):
    """Shards modules with torch's ``fully_shard``, on CUDA or on the CPU.

    ``Fabric(strategy="fsdp2")`` is this class with its defaults.

    Example:
        >>> strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
        >>> strategy.options.cpu_offload
        True
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        self.device_mesh  # noqa: B018  # makes it on all ranks now: later, one rank alone may ask for it

    def parallelize(self) -> None:
        """Only check: ``fabric.setup(model)`` has sharded the model. For code that is written for the Trainer.

        Raises:
            ShardingError: No model was set up yet.
        """
        if not self.roots:
            raise ShardingError(
                "FSDP2Strategy.parallelize() was called before there is a module to shard.\n"
                "Write model = fabric.setup(model), or model, optimizer = fabric.setup(model, optimizer): it shards."
            )

    def setup_module(self, module: nn.Module) -> nn.Module:
        wrapped = super().setup_module(module)
        if self.options.loss_parallel:
            original_forward = wrapped.forward

            def forward_with_parallel_loss(*args: Any, **kwargs: Any) -> Any:
                with with_parallel_loss():
                    return original_forward(*args, **kwargs)

            wrapped.forward = forward_with_parallel_loss
        return wrapped

    def backward_context(self) -> AbstractContextManager[None]:
        return with_parallel_loss(self.options.loss_parallel)
