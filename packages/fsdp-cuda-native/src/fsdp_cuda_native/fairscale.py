"""``strategy="ddp_fully_sharded"``: the name and the options that users of fairscale's FSDP know."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_cuda_native.fabric import NativeFSDPStrategy
from fsdp_cuda_native.trainer import DDPFullyShardedNativeStrategy

__all__ = ["DDPFullyShardedStrategy", "FabricFullyShardedStrategy"]

#: Fairscale's options that ``fsdp_native`` has under other names or not at all, with their defaults.
FAIRSCALE_OPTIONS: dict[str, Any] = {
    "flatten_parameters": True,
    "reshard_after_forward": True,
    "move_grads_to_cpu": None,
    "fp32_reduce_scatter": None,
    "compute_dtype": None,
    "bucket_cap_mb": 25,
    "min_num_params": None,
    "state_dict_to_cpu": True,
}

#: The defaults of fsdp_native.
_DEFAULTS = {n: one.default for n, one in inspect.signature(DDPFullyShardedNativeStrategy).parameters.items()}

#: Options without a counterpart: their defaults, and what to write in their place.
_WITHOUT_COUNTERPART: dict[str, tuple[tuple[Any, ...], str]] = {
    "flatten_parameters": ((True,), "Parameters are always flattened; use strategy='fsdp2' to keep them apart."),
    "move_grads_to_cpu": ((None,), "Gradients are where their shards are: write cpu_offload=True, or leave it out."),
    "bucket_cap_mb": ((25,), "Leave it out: each unit is reduced at once."),
    "state_dict_to_cpu": ((True,), "Leave it out: checkpoints never pass through a full copy on the device."),
}


class DDPFullyShardedStrategy(DDPFullyShardedNativeStrategy):
    """``fsdp_native`` with the options of the strategy that Lightning had for fairscale.

    Args:
        accelerator: As in Lightning.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        flatten_parameters: ``True`` only.
        reshard_after_forward: Whether units free their parameters between forward and backward pass.
        move_grads_to_cpu: ``None`` only; gradients follow ``cpu_offload``.
        fp32_reduce_scatter: Whether gradients are reduced in fp32 and not in ``compute_dtype``, if that is given;
            precision strings such as ``"16-mixed"`` reduce in fp32 in any case.
        compute_dtype: The dtype to compute in; that of ``precision`` when ``None``.
        bucket_cap_mb: 25 only; there are no buckets.
        min_num_params: The size from which a submodule is a unit of its own; the repeated blocks are when ``None``.
        state_dict_to_cpu: ``True`` only.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.
        process_group_backend: As in :func:`torch.distributed.init_process_group`.
        **options: Those of :class:`~fsdp_cuda_native.trainer.DDPFullyShardedNativeStrategy`, such as
            ``activation_checkpointing``.

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
        accelerator: Any = None,
        cpu_offload: bool = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: int = 25,
        min_num_params: float | None = None,
        state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        translated = translate(
            options,
            flatten_parameters=flatten_parameters,
            reshard_after_forward=reshard_after_forward,
            move_grads_to_cpu=move_grads_to_cpu,
            fp32_reduce_scatter=fp32_reduce_scatter,
            compute_dtype=compute_dtype,
            bucket_cap_mb=bucket_cap_mb,
            min_num_params=min_num_params,
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
            **translated,
            **options,  # passed on as they are, so that LightningCLI finds them
        )


class FabricFullyShardedStrategy(NativeFSDPStrategy):
    """What ``Fabric(strategy="ddp_fully_sharded")`` means: ``fsdp_native`` with fairscale's options.

    Args:
        accelerator: As in Lightning.
        **options: Those of :class:`DDPFullyShardedStrategy` that are fairscale's, and those of
            :class:`~fsdp_cuda_native.fabric.NativeFSDPStrategy`.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.

    Example:
        >>> FabricFullyShardedStrategy(reshard_after_forward=False).backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    called: ClassVar[str] = "ddp_fully_sharded"

    def __init__(self, accelerator: Any = None, **options: Any) -> None:
        old = {name: options.pop(name, default) for name, default in FAIRSCALE_OPTIONS.items()}
        super().__init__(accelerator=accelerator, **translate(options, **old), **options)


def translate(
    options: dict[str, Any],
    *,
    flatten_parameters: bool,
    reshard_after_forward: bool,
    move_grads_to_cpu: bool | None,
    fp32_reduce_scatter: bool | None,
    compute_dtype: torch.dtype | None,
    bucket_cap_mb: int,
    min_num_params: float | None,
    state_dict_to_cpu: bool,
) -> dict[str, Any]:
    """The options of ``fsdp_native`` that say what fairscale's say.

    Args:
        options: Options of ``fsdp_native`` that are given too. Those that a translation stands for are taken out:
            LightningCLI gives every option, with its default where the user has given none.
        flatten_parameters: See :class:`DDPFullyShardedStrategy`, as for the following.
        reshard_after_forward: Becomes ``sharding_strategy``.
        move_grads_to_cpu: ``None`` only.
        fp32_reduce_scatter: Becomes a part of ``mixed_precision``.
        compute_dtype: Becomes ``mixed_precision``.
        bucket_cap_mb: 25 only.
        min_num_params: Becomes ``auto_wrap_policy``.
        state_dict_to_cpu: ``True`` only.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.
    """
    _refuse_without_counterpart(
        flatten_parameters=flatten_parameters,
        move_grads_to_cpu=move_grads_to_cpu,
        bucket_cap_mb=bucket_cap_mb,
        state_dict_to_cpu=state_dict_to_cpu,
    )
    new: dict[str, tuple[str, Any]] = {}
    if not reshard_after_forward:
        new["sharding_strategy"] = ("reshard_after_forward", "SHARD_GRAD_OP")
    if compute_dtype is not None:
        reduce = torch.float32 if fp32_reduce_scatter else compute_dtype
        policy = MixedPrecision(param_dtype=compute_dtype, reduce_dtype=reduce, cast_forward_inputs=True)
        new["mixed_precision"] = ("compute_dtype", policy)
    if min_num_params is not None:
        by_size = partial(size_based_auto_wrap_policy, min_num_params=int(min_num_params))
        new["auto_wrap_policy"] = ("min_num_params", by_size)
    for name, (old, _) in new.items():
        if name in options and options.pop(name) != _DEFAULTS.get(name, inspect.Parameter.empty):
            raise UnsupportedCapabilityError(
                f"{old} and {name} are an old and a new spelling of one option.\nWrite {name} alone."
            )
    return {name: value for name, (_, value) in new.items()}


def _refuse_without_counterpart(**given: Any) -> None:
    for name, value in given.items():
        allowed, instead = _WITHOUT_COUNTERPART[name]
        if value not in allowed:
            raise UnsupportedCapabilityError(
                f"strategy 'ddp_fully_sharded' can't take {name}={value!r}, which only fairscale had.\n{instead}"
            )
