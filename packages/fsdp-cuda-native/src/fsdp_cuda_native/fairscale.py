"""``strategy="ddp_fully_sharded"``: ``fsdp_native`` under the name and with the options of fairscale's FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never

import torch
from lightning.fabric.accelerators import Accelerator as FabricAccelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_cuda_native.fabric import NativeFSDPStrategy
from fsdp_cuda_native.options import refuse_others_options
from fsdp_cuda_native.trainer import DDPFullyShardedNativeStrategy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy

__all__ = ["DDPFullyShardedStrategy", "FabricFullyShardedStrategy"]

#: Fairscale's options without a counterpart: the default, and what to write instead of any other value.
_WITHOUT_COUNTERPART: dict[str, tuple[object, str]] = {
    "flatten_parameters": (True, "Parameters are always flattened; use strategy='fsdp2' to keep them apart."),
    "move_grads_to_cpu": (None, "Gradients are where their shards are: write cpu_offload=True, or leave it out."),
    "bucket_cap_mb": (25, "Leave it out: each unit is reduced at once."),
    "state_dict_to_cpu": (True, "Leave it out: checkpoints never pass through a full copy on the device."),
}


class DDPFullyShardedStrategy(DDPFullyShardedNativeStrategy):
    """``fsdp_native`` with the options of Lightning's former fairscale strategy.

    Args:
        accelerator: As in Lightning.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        flatten_parameters: ``True`` only.
        reshard_after_forward: Whether units free their parameters between forward and backward pass.
        move_grads_to_cpu: ``None`` only; gradients follow ``cpu_offload``.
        fp32_reduce_scatter: Whether gradients are reduced in fp32 instead of ``compute_dtype``, if that is given;
            precision strings such as ``"16-mixed"`` always reduce in fp32.
        compute_dtype: The dtype to compute in; that of ``precision`` when ``None``.
        bucket_cap_mb: 25 only; there are no buckets.
        min_num_params: The number of parameters from which a submodule is a unit; ``None``: repeated blocks are units.
        state_dict_to_cpu: ``True`` only.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.
        process_group_backend: As in :func:`torch.distributed.init_process_group`.
        backward_prefetch: As in :class:`~fsdp_cuda_native.trainer.DDPFullyShardedNativeStrategy`; so are those below.
        mixed_precision: Or ``compute_dtype``.
        activation_checkpointing: A class of modules, or a list of classes.
        auto_wrap_policy: Or ``min_num_params``.
        activation_checkpointing_policy: Or ``activation_checkpointing``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
        state_dict_type: ``"sharded"`` or ``"full"``.
        timeout: How long a collective may wait for its peers.
        async_save: Whether checkpoints are written in the background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
        sharding_strategy: ``None``: chosen by ``reshard_after_forward``.
        use_orig_params: Whether optimizers hold the original parameters instead of one flat parameter per unit.
        ignored_modules: Modules that are replicated on every rank.
        ignored_states: The same; takes parameters too.
        process_group: The ranks to shard over.
        device_mesh: The same as a mesh, or as its shape.
        param_init_fn: Initializes a module that was built on the meta device.
        forward_prefetch: Whether the next unit is gathered before it is needed in the forward pass.
        limit_all_gathers: Whether at most two units are gathered ahead, to bound memory.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.

    Example:
        >>> strategy = DDPFullyShardedStrategy(reshard_after_forward=False, cpu_offload=True)
        >>> strategy.backend.sharding_strategy, strategy.backend.cpu_offload
        (<ShardingStrategy.SHARD_GRAD_OP: 2>, True)
    """

    called: ClassVar[str] = "ddp_fully_sharded"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        cpu_offload: bool | CPUOffload | None = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: int = 25,
        min_num_params: float | None = None,
        state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        *,
        backward_prefetch: BackwardPrefetch | str | None = "BACKWARD_PRE",
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        timeout: timedelta | None = None,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        sharding_strategy: ShardingStrategy | str | None = None,
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
        refuse_fairscales_options(
            type(self),
            unknown,
            flatten_parameters=flatten_parameters,
            move_grads_to_cpu=move_grads_to_cpu,
            bucket_cap_mb=bucket_cap_mb,
            state_dict_to_cpu=state_dict_to_cpu,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy,
            sync_each_batch=sync_each_batch,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
            use_orig_params=use_orig_params,
            ignored_modules=ignored_modules,
            ignored_states=ignored_states,
            process_group=process_group,
            device_mesh=device_mesh,
            param_init_fn=param_init_fn,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            **translate(
                sharding_strategy=sharding_strategy,
                mixed_precision=mixed_precision,
                auto_wrap_policy=auto_wrap_policy,
                reshard_after_forward=reshard_after_forward,
                fp32_reduce_scatter=fp32_reduce_scatter,
                compute_dtype=compute_dtype,
                min_num_params=min_num_params,
            ),
        )


class FabricFullyShardedStrategy(NativeFSDPStrategy):
    """What ``Fabric(strategy="ddp_fully_sharded")`` means: ``fsdp_native`` with fairscale's options.

    Args:
        accelerator: As in Lightning.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        flatten_parameters: ``True`` only.
        reshard_after_forward: Whether units free their parameters between forward and backward pass.
        move_grads_to_cpu: ``None`` only; gradients follow ``cpu_offload``.
        fp32_reduce_scatter: Whether gradients are reduced in fp32 instead of ``compute_dtype``, if that is given;
            precision strings such as ``"16-mixed"`` always reduce in fp32.
        compute_dtype: The dtype to compute in; that of ``precision`` when ``None``.
        bucket_cap_mb: 25 only; there are no buckets.
        min_num_params: The number of parameters from which a submodule is a unit; ``None``: repeated blocks are units.
        state_dict_to_cpu: ``True`` only.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning.
        precision: As in Lightning.
        process_group_backend: As in :func:`torch.distributed.init_process_group`.
        backward_prefetch: As in :class:`~fsdp_cuda_native.fabric.NativeFSDPStrategy`; so are those below.
        mixed_precision: Or ``compute_dtype``.
        activation_checkpointing: A class of modules, or a list of classes.
        auto_wrap_policy: Or ``min_num_params``.
        activation_checkpointing_policy: Or ``activation_checkpointing``.
        sync_each_batch: Whether gradients are reduced on every micro-batch of an accumulation.
        state_dict_type: ``"sharded"`` or ``"full"``.
        timeout: How long a collective may wait for its peers.
        async_save: Whether checkpoints are written in the background.
        error_if_nonfinite: Whether to raise on all ranks, with the names of parameters, before a step whose gradients
            hold NaN or infinity.
        sharding_strategy: ``None``: chosen by ``reshard_after_forward``.
        use_orig_params: Whether optimizers hold the original parameters instead of one flat parameter per unit.
        ignored_modules: Modules that are replicated on every rank.
        ignored_states: The same; takes parameters too.
        process_group: The ranks to shard over.
        device_mesh: The same as a mesh, or as its shape.
        param_init_fn: Initializes a module that was built on the meta device.
        forward_prefetch: Whether the next unit is gathered before it is needed in the forward pass.
        limit_all_gathers: Whether at most two units are gathered ahead, to bound memory.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.

    Example:
        >>> FabricFullyShardedStrategy(reshard_after_forward=False).backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    called: ClassVar[str] = "ddp_fully_sharded"

    def __init__(
        self,
        accelerator: FabricAccelerator | None = None,
        cpu_offload: bool | CPUOffload | None = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: int = 25,
        min_num_params: float | None = None,
        state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: FabricPrecision | None = None,
        process_group_backend: str | None = None,
        *,
        backward_prefetch: BackwardPrefetch | str | None = "BACKWARD_PRE",
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        sync_each_batch: bool = False,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        timeout: timedelta | None = None,
        async_save: bool = False,
        error_if_nonfinite: bool = False,
        sharding_strategy: ShardingStrategy | str | None = None,
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
        refuse_fairscales_options(
            type(self),
            unknown,
            flatten_parameters=flatten_parameters,
            move_grads_to_cpu=move_grads_to_cpu,
            bucket_cap_mb=bucket_cap_mb,
            state_dict_to_cpu=state_dict_to_cpu,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy,
            sync_each_batch=sync_each_batch,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
            error_if_nonfinite=error_if_nonfinite,
            use_orig_params=use_orig_params,
            ignored_modules=ignored_modules,
            ignored_states=ignored_states,
            process_group=process_group,
            device_mesh=device_mesh,
            param_init_fn=param_init_fn,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            **translate(
                sharding_strategy=sharding_strategy,
                mixed_precision=mixed_precision,
                auto_wrap_policy=auto_wrap_policy,
                reshard_after_forward=reshard_after_forward,
                fp32_reduce_scatter=fp32_reduce_scatter,
                compute_dtype=compute_dtype,
                min_num_params=min_num_params,
            ),
        )


def translate(
    *,
    sharding_strategy: ShardingStrategy | str | None,
    mixed_precision: MixedPrecision | None,
    auto_wrap_policy: WrapPolicy | None,
    reshard_after_forward: bool,
    fp32_reduce_scatter: bool | None,
    compute_dtype: torch.dtype | None,
    min_num_params: float | None,
) -> dict[str, Any]:
    """Translate fairscale's options into ``sharding_strategy``, ``mixed_precision`` and ``auto_wrap_policy``.

    Args:
        sharding_strategy: The user's value.
        mixed_precision: The user's value.
        auto_wrap_policy: The user's value.
        reshard_after_forward: Becomes ``sharding_strategy``.
        fp32_reduce_scatter: Becomes part of ``mixed_precision``.
        compute_dtype: Becomes ``mixed_precision``.
        min_num_params: Becomes ``auto_wrap_policy``.

    Raises:
        UnsupportedCapabilityError: An option is given in its old and its new spelling.
    """
    if not reshard_after_forward:
        _refuse_two_spellings("reshard_after_forward", "sharding_strategy", sharding_strategy is not None)
        sharding_strategy = "SHARD_GRAD_OP"
    if compute_dtype is not None:
        _refuse_two_spellings("compute_dtype", "mixed_precision", mixed_precision is not None)
        reduce = torch.float32 if fp32_reduce_scatter else compute_dtype
        mixed_precision = MixedPrecision(param_dtype=compute_dtype, reduce_dtype=reduce, cast_forward_inputs=True)
    if min_num_params is not None:
        _refuse_two_spellings("min_num_params", "auto_wrap_policy", auto_wrap_policy != "auto")
        auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=int(min_num_params))
    return {
        "sharding_strategy": "FULL_SHARD" if sharding_strategy is None else sharding_strategy,
        "mixed_precision": mixed_precision,
        "auto_wrap_policy": auto_wrap_policy,
    }


def _refuse_two_spellings(old: str, new: str, both: bool) -> None:
    if both:
        raise UnsupportedCapabilityError(
            f"{old} and {new} are an old and a new spelling of one option.\nWrite {new} alone."
        )


def refuse_fairscales_options(made: type, unknown: Mapping[str, object], **given: object) -> None:
    """Refuse options that only fairscale had, and unknown options, in one error.

    Args:
        made: The strategy's class.
        unknown: Other keyword arguments that its constructor received.
        **given: The values of options without a counterpart.

    Raises:
        UnsupportedCapabilityError: An option is refused.
    """
    told = [
        f"strategy 'ddp_fully_sharded' can't take {name}={value!r}, which only fairscale had.\n{instead}"
        for name, (default, instead) in _WITHOUT_COUNTERPART.items()
        if (value := given[name]) != default
    ]
    try:
        refuse_others_options("ddp_fully_sharded", made, unknown)
    except UnsupportedCapabilityError as error:
        told.append(str(error))
    if told:
        raise UnsupportedCapabilityError("\n".join(told))
