"""The options of ``strategy="xla_fsdp"``, the same under Trainer and Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Literal, Never

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision

from fsdp_core.lightning import StrategyOptions
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.classic.backend import XLABackend
from fsdp_xla.classic.runtime import XLARuntime
from fsdp_xla.lightning.cluster_environment import XLADeviceRanks, XLARanks
from fsdp_xla.options import ALWAYS, INSTEAD, check_sequential_save

__all__ = ["XLAFSDPOptions"]


class XLAFSDPOptions(XLADeviceRanks, StrategyOptions):
    """Constructor of both strategy classes, with the positional arguments of Fabric's ``XLAFSDPStrategy``.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: A Lightning precision plugin; ``Trainer(precision="bf16-mixed")`` is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool``, one of torch_xla's or torch's policies, ``"auto"`` for the blocks repeated in
            ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes, a function ``module -> bool``, or ``"every_2"`` for every second repeated block, and so on.
        state_dict_type: ``"sharded"`` for checkpoint folders to which every rank writes its shards, ``"full"`` for one
            file gathered on rank 0.
        sequential_save: Whether the ranks of a host save one after another, so that only part of one rank's state is in
            host memory at a time.
        timeout: How long a rank waits for the others; ``hang_timeout`` when ``None``.
        async_save: Whether a save returns once the state is copied to host memory, and the checkpoint is written in the
            background.
        scattered_save: Whether ranks that don't share a folder each save where they stand: hosts without a shared disk,
            or paths that differ. `fsdp checkpoint gather` joins what they have written.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
        hang_timeout: How long a rank waits for the others where ``timeout`` is ``None``, in seconds or as a timedelta.
            Then all raise, with the rank that did not come and the line where it is.
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
    others_options: ClassVar = INSTEAD
    happens_anyway: ClassVar = ALWAYS

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
        scattered_save: bool = False,
        error_if_nonfinite: bool = False,
        hang_timeout: timedelta | float | None = 1800.0,
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
        # not passed on: LightningCLI would take core's arguments for further options
        refuse_unknown_options("xla_fsdp", type(self), unknown, INSTEAD, always=ALWAYS)
        check_sequential_save(sequential_save, async_save)
        self.sequential_save = sequential_save
        backend = XLABackend(
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
        )
        super().__init__(
            backend,
            accelerator,
            parallel_devices,
            XLARanks(),
            checkpoint_io,
            precision,
            strategy_name="xla_fsdp",
            runtime=XLARuntime(),
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            scattered_save=scattered_save,
            error_if_nonfinite=error_if_nonfinite,
            hang_timeout=hang_timeout,
        )
