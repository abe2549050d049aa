"""``strategy="xla_fsdp_spmd"`` for the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Never

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.lightning.batch_shapes import BatchShapes, stage_of
from fsdp_xla.lightning.host_metrics import compute_metrics_on_host, count_on_host, log_numbers_on_host
from fsdp_xla.lightning.one_process import OneProcess
from fsdp_xla.options import ALWAYS_IN_SPMD, INSTEAD_IN_SPMD

__all__ = ["XLASPMDStrategy"]


class XLASPMDStrategy(OneProcess, ShardedTrainerStrategy):
    """Shards a LightningModule with torch_xla's SPMD: one process drives all XLA devices of the host.

    ``Trainer(strategy="xla_fsdp_spmd", devices=4)`` is this class with its defaults. ``devices`` is the number of
    devices of the host. On the CPU, where XLA can create any number of them, ``CPU_NUM_DEVICES`` is set to it.

    There is one rank, so a batch of the dataloader is a global batch: its tensors are sharded along their first
    dimension, and each device gets a part. If the number of devices doesn't divide the number of rows, as in the last
    batch of an epoch, XLA pads it without affecting results. But each new size is a new program to compile, so prefer
    ``drop_last=True``.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision_plugin: As in Lightning; ``Trainer(precision="bf16-mixed")`` is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks
            repeated in ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        tensor_parallel_size: The number of devices that share one part of the batch and shard weights by
            ``tensor_plan``. It must divide the number of devices.
        tensor_plan: By pattern of parameter names (``*`` matches anything), the dimension to shard over these devices,
            such as ``{"*.mlp.up.weight": 0, "*.mlp.down.weight": 1}``. Other parameters are replicated on them.
        state_dict_type: ``"sharded"`` for checkpoint folders of shards, ``"full"`` for one file.
        async_save: Whether a save returns once the state is copied to host memory, and the checkpoint is written in the
            background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.

    Example:
        >>> strategy = XLASPMDStrategy(tensor_parallel_size=2, tensor_plan={"*.up.weight": 0})
        >>> strategy.num_processes
        1
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        tensor_parallel_size: int = 1,
        tensor_plan: Mapping[str, int] | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown_options("xla_fsdp_spmd", XLASPMDStrategy, unknown, INSTEAD_IN_SPMD, always=ALWAYS_IN_SPMD)
        self._batch_shapes = BatchShapes()
        super().__init__(
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            tensor_parallel_size=tensor_parallel_size,
            tensor_plan=tensor_plan,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            state_dict_type=state_dict_type,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
        )

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
        return self._shard_batch(super().batch_to_device(batch, device, dataloader_idx))

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self.backend.first_steps.of(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
