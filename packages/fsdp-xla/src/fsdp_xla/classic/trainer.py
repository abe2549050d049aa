"""``strategy="xla_fsdp"`` for the Trainer.

``MpDeviceLoader`` is not used. It prefetches batches, which an exact resume could not account for. Lightning's own
transfer at each step is sufficient on the CPU, and unmeasured on a TPU.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal, Never

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.classic.backend import XLABackend
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.lightning.batch_shapes import BatchShapes, stage_of
from fsdp_xla.lightning.cluster_environment import XLADeviceRanks, XLARanks, refuse_synced_norms
from fsdp_xla.lightning.host_metrics import (
    compute_metrics_on_host,
    count_on_host,
    log_numbers_on_host,
    reduce_metrics_over,
)
from fsdp_xla.lightning.launchers import TrainerXLALauncher
from fsdp_xla.options import ALWAYS, INSTEAD, check_sequential_save
from fsdp_xla.torch_xla_private.devices import sync

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(XLADeviceRanks, ShardedTrainerStrategy):
    """Shards a LightningModule with torch_xla's ``XlaFullyShardedDataParallel``, one rank per XLA device.

    ``Trainer(strategy="xla_fsdp")`` is this class with its defaults.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: A Lightning precision plugin; ``Trainer(precision="bf16-mixed")`` is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool``, one of torch_xla's or torch's policies, ``"auto"`` for the blocks repeated in
            ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        state_dict_type: ``"sharded"`` for checkpoint folders to which every rank writes its shards, ``"full"`` for one
            file gathered on rank 0.
        sequential_save: Whether the ranks of a host save one after another, so that only part of one rank's state is in
            host memory at a time.
        timeout: How long a rank waits for the others; half an hour when ``None``.
        async_save: Whether a save returns once the state is copied to host memory, and the checkpoint is written in the
            background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
        reshard_after_forward: Whether units free their parameters between forward and backward pass.
        flatten_parameters: Whether a unit's parameters are flattened into one, for fewer collectives.
        execute_sharding_on_init: Whether a unit is sharded immediately, and its full parameters freed.
        optimization_barrier_in_forward: Whether a barrier keeps XLA from fusing a unit's forward pass with adjacent
            operations, which saves memory.
        optimization_barrier_in_backward: The same for its backward pass.
        sync_on_finalization: Whether forward and backward pass run as a program separate from the optimizer step.
        disable_reshard_on_root: Whether the root's parameters are kept between forward and backward pass.
        compute_dtype: The dtype to compute in; ``None``: chosen by ``precision``.
        buffer_dtype: The dtype of floating-point buffers; ``None``: they keep their own.
        fp32_reduce_scatter: Whether gradients are reduced in fp32 if ``compute_dtype`` is another dtype.
        shard_param_on_dim_0: Whether parameters are sharded along their first dimension instead of flattened.
        pin_layout_in_collective_ops: Whether layouts are pinned in collectives; not on the CPU.
        reduce_scatter_bucket_size_mb: The size of buckets in which gradients are reduced; 0: no buckets.
        coalesce_all_gather_ops: Whether a unit's parameters are gathered in one collective; needs
            ``shard_param_on_dim_0``.

    Raises:
        UnsupportedCapabilityError: An option is unknown, or can't be used.
    """

    backend: XLABackend
    runtime: XLARuntime
    launcher_class: ClassVar[Any] = TrainerXLALauncher

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        sequential_save: bool = False,
        *,
        timeout: timedelta | None = None,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = False,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        **unknown: Never,
    ) -> None:
        self._batch_shapes = BatchShapes()
        refuse_unknown_options("xla_fsdp", XLAFSDPStrategy, unknown, INSTEAD, always=ALWAYS)
        check_sequential_save(sequential_save, async_save)
        self.sequential_save = sequential_save
        super().__init__(
            XLABackend(
                auto_wrap_policy=auto_wrap_policy,
                activation_checkpointing_policy=activation_checkpointing_policy,
                sequential_save=sequential_save,
                reshard_after_forward=reshard_after_forward,
                flatten_parameters=flatten_parameters,
                execute_sharding_on_init=execute_sharding_on_init,
                optimization_barrier_in_forward=optimization_barrier_in_forward,
                optimization_barrier_in_backward=optimization_barrier_in_backward,
                sync_on_finalization=sync_on_finalization,
                disable_reshard_on_root=disable_reshard_on_root,
                compute_dtype=compute_dtype,
                buffer_dtype=buffer_dtype,
                fp32_reduce_scatter=fp32_reduce_scatter,
                shard_param_on_dim_0=shard_param_on_dim_0,
                pin_layout_in_collective_ops=pin_layout_in_collective_ops,
                reduce_scatter_bucket_size_mb=reduce_scatter_bucket_size_mb,
                coalesce_all_gather_ops=coalesce_all_gather_ops,
            ),
            strategy_name="xla_fsdp",
            runtime=XLARuntime(),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=XLARanks(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
        )

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
