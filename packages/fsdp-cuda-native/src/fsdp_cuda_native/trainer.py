"""``strategy="fsdp_native"`` for the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, Never

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from fsdp_core import ProcessGroupRuntime
from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_cuda_native.backend import NativeBackend
from fsdp_cuda_native.options import refuse_others_options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

__all__ = ["DDPFullyShardedNativeStrategy"]


class DDPFullyShardedNativeStrategy(ShardedTrainerStrategy):
    """Shards a LightningModule with torch's ``FullyShardedDataParallel``, on CUDA or on the CPU.

    ``Trainer(strategy="fsdp_native")`` is this class with its defaults.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision_plugin: As in Lightning; ``Trainer(precision="bf16-mixed")`` is the usual way.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory: a bool, or torch's
            :class:`~torch.distributed.fsdp.CPUOffload`.
        backward_prefetch: When the next unit is gathered in the backward pass: torch's enum, or ``"BACKWARD_PRE"``,
            ``"BACKWARD_POST"``; ``None``: when it is needed.
        mixed_precision: A :class:`~torch.distributed.fsdp.MixedPrecision`; overrides ``precision``.
        activation_checkpointing: A class of modules that recompute their activations in the backward pass, or a list
            of classes.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s,
            or ``None`` for the root alone.
        activation_checkpointing_policy: As ``activation_checkpointing``, a set of classes or a function
            ``module -> bool``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated
            gradients sharded at the cost of more communication.
        state_dict_type: ``"sharded"`` for checkpoint folders to which every rank writes its shards, ``"full"`` for one
            file gathered on rank 0.
        timeout: How long a collective may wait for its peers; torch's default when ``None``.
        async_save: Whether a save returns once the state is copied to host memory, and the checkpoint is written in the
            background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
        sharding_strategy: One of torch's :class:`~torch.distributed.fsdp.ShardingStrategy`, or its name:
            ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"``, ``"HYBRID_SHARD"``, ``"HYBRID_SHARD_ZERO2"``, ``"NO_SHARD"``.
        use_orig_params: Whether optimizers hold the original parameters instead of one flat parameter per unit.
        ignored_modules: Modules that are replicated on every rank, with gradients averaged.
        ignored_states: The same; takes parameters too.
        process_group: The ranks to shard over; for hybrid sharding a pair, with those to replicate over.
        device_mesh: The same as a mesh, or as its shape; for hybrid sharding (replicas, ranks of each).
        param_init_fn: Initializes a module that was built on the meta device.
        forward_prefetch: Whether the next unit is gathered before it is needed in the forward pass.
        limit_all_gathers: Whether at most two units are gathered ahead, to bound memory.

    Raises:
        UnsupportedCapabilityError: An option is unknown, or contradicts another.

    Example:
        >>> strategy = DDPFullyShardedNativeStrategy(sharding_strategy="SHARD_GRAD_OP")
        >>> strategy.backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    backend: NativeBackend
    #: The name that users type.
    called: ClassVar[str] = "fsdp_native"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        cpu_offload: bool | CPUOffload | None = False,
        backward_prefetch: BackwardPrefetch | str | None = "BACKWARD_PRE",
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        timeout: timedelta | None = None,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        sharding_strategy: ShardingStrategy | str = "FULL_SHARD",
        use_orig_params: bool = True,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        device_mesh: DeviceMesh | tuple[int, ...] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_others_options(self.called, type(self), unknown)
        super().__init__(
            NativeBackend(
                auto_wrap_policy=auto_wrap_policy,
                activation_checkpointing_policy=activation_checkpointing_policy,
                activation_checkpointing=activation_checkpointing,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                sync_each_batch=sync_each_batch,
                sharding_strategy=sharding_strategy,
                use_orig_params=use_orig_params,
                ignored_modules=ignored_modules,
                ignored_states=ignored_states,
                process_group=process_group,
                device_mesh=device_mesh,
                param_init_fn=param_init_fn,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
            ),
            strategy_name=self.called,
            runtime=ProcessGroupRuntime(process_group_backend),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
        )
