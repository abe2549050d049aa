"""``strategy="fsdp2"`` for the Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_core import ShardingError
from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_fsdp2.constructor import FSDP2Ranks
from fsdp_fsdp2.tensor_parallel.loss import with_parallel_loss

__all__ = ["FSDP2Strategy"]


class FSDP2Strategy(FSDP2Ranks, ShardedTrainerStrategy):
    """Shards a LightningModule with torch's ``fully_shard``, on CUDA or on the CPU.

    ``Trainer(strategy="fsdp2")`` is this class with its defaults.

    Example:
        >>> strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
        >>> strategy.options.cpu_offload
        True
    """

    _have_ranks_joined = False

    def setup_environment(self) -> None:
        super().setup_environment()
        self._have_ranks_joined = True
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.device_mesh  # its public property is read-only

    def parallelize(self) -> None:
        """Shard the module now.

        In this order: float8, activation checkpointing, compilation and activation offload; then, unit by unit, tensor
        parallelism and ``fully_shard``; then prefetching.

        A stage does it by itself, after ``configure_model()``. A module that is sharded already is left as it is. All
        ranks must call it.

        Raises:
            ShardingError: There is no module yet, or it can't be sharded as requested.
        """
        module = self.lightning_module
        if module is None or not self._have_ranks_joined:
            raise ShardingError(
                "FSDP2Strategy.parallelize() was called before there is a module to shard.\n"
                "Call trainer.fit(module), which shards it after configure_model(); or call "
                "self.trainer.strategy.parallelize() at the end of configure_model(), to have shards from there on."
            )
        self._shard_converted(module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with with_parallel_loss(self.options.loss_parallel):
            return super().training_step(*args, **kwargs)

    def _eval_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with with_parallel_loss(self.options.loss_parallel):
            return super()._eval_step(name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with with_parallel_loss(self.options.loss_parallel):
            return super().backward(closure_loss, *args, **kwargs)
