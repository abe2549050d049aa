"""``strategy="fsdp2"`` for Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Never

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision

from fsdp_core import ProcessGroupRuntime
from fsdp_core.lightning import ShardedFabricStrategy
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_fsdp2.backend import FSDP2Backend
from fsdp_fsdp2.migration import ALWAYS, OTHERS_OPTIONS

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["FSDP2Strategy"]


class FSDP2Strategy(ShardedFabricStrategy):
    """Shards modules with torch's ``fully_shard``, on CUDA or on the CPU.

    ``Fabric(strategy="fsdp2")`` is this class with its defaults.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: As in Lightning; ``Fabric(precision="bf16-mixed")`` is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool`` or one of torch's policies, ``"auto"`` for the blocks
            repeated in ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        reshard_after_forward: Whether units free their parameters between forward and backward pass. An integer keeps
            them sharded over groups of so many ranks. ``None``: all do but the root and the last unit, which the
            backward pass needs first.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        mp_policy: A :class:`~torch.distributed.fsdp.MixedPrecisionPolicy`, which wins over ``precision``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated
            gradients sharded, for more communication.
        state_dict_type: ``"sharded"`` for checkpoint folders that every rank writes its part of, ``"full"`` for one
            file gathered on rank 0.
        process_group_backend: As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``.
        timeout: How long a collective may wait for its peers; torch's default when ``None``.
        async_save: Whether a save returns when the state is copied to host memory, and the checkpoint is written behind
            training.

    Example:
        >>> strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
        >>> strategy.backend.cpu_offload
        True
    """

    backend: FSDP2Backend

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        sync_each_batch: bool = False,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        async_save: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown_options("fsdp2", FSDP2Strategy, unknown, OTHERS_OPTIONS, always=ALWAYS)
        super().__init__(
            FSDP2Backend(
                auto_wrap_policy=auto_wrap_policy,
                activation_checkpointing_policy=activation_checkpointing_policy,
                reshard_after_forward=reshard_after_forward,
                cpu_offload=cpu_offload,
                mp_policy=mp_policy,
                sync_each_batch=sync_each_batch,
            ),
            strategy_name="fsdp2",
            runtime=ProcessGroupRuntime(process_group_backend),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
        )
