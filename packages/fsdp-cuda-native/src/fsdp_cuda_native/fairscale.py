"""``strategy="ddp_fully_sharded"``: ``fsdp_native`` under the name and with the options of fairscale's FSDP."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.plugins import refuse_unknown_options
from fsdp_core.sharding import WrapPolicy
from fsdp_cuda_native.constructor import NativeOptions
from fsdp_cuda_native.fabric import NativeFSDPStrategy
from fsdp_cuda_native.options import ALWAYS, OTHER_OPTIONS
from fsdp_cuda_native.trainer import DDPFullyShardedNativeStrategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffload, ShardingStrategy

__all__ = ["DDPFullyShardedStrategy", "FabricFullyShardedStrategy", "FairscaleOptions"]

#: Fairscale's options without a counterpart: the default, and what to write instead of any other value.
_WITHOUT_COUNTERPART: dict[str, tuple[object, str]] = {
    "flatten_parameters": (True, "Parameters are always flattened; use strategy='fsdp2' to keep them apart."),
    "move_grads_to_cpu": (None, "Gradients are where their shards are: write cpu_offload=True, or leave it out."),
    "bucket_cap_mb": (25, "Leave it out: each unit is reduced at once."),
    "state_dict_to_cpu": (True, "Leave it out: checkpoints never pass through a full copy on the device."),
}


class FairscaleOptions(NativeOptions):
    """Constructor of both strategy classes: fairscale's options, in the order of Lightning's former strategy.

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
        mixed_precision: A :class:`~torch.distributed.fsdp.MixedPrecision`; or ``compute_dtype``.
        auto_wrap_policy: As for ``fsdp_native``; or ``min_num_params``.
        sharding_strategy: As for ``fsdp_native``; ``None``: chosen by ``reshard_after_forward``.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.
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
        *common: Any,
        mixed_precision: MixedPrecision | None = None,
        auto_wrap_policy: WrapPolicy | None = "auto",
        sharding_strategy: ShardingStrategy | str | None = None,
        **others: Any,
    ) -> None:
        refuse_fairscales_options(
            type(self),
            others,
            flatten_parameters=flatten_parameters,
            move_grads_to_cpu=move_grads_to_cpu,
            bucket_cap_mb=bucket_cap_mb,
            state_dict_to_cpu=state_dict_to_cpu,
        )
        # the next constructor is the front end's, whose fifth argument is the precision, and not that of NativeOptions
        super().__init__(  # type: ignore[misc]
            accelerator,  # type: ignore[arg-type]
            parallel_devices,  # type: ignore[arg-type]
            cluster_environment,  # type: ignore[arg-type]
            checkpoint_io,  # type: ignore[arg-type]
            *common,
            cpu_offload=cpu_offload,
            **translate(
                sharding_strategy=sharding_strategy,
                mixed_precision=mixed_precision,
                auto_wrap_policy=auto_wrap_policy,
                reshard_after_forward=reshard_after_forward,
                fp32_reduce_scatter=fp32_reduce_scatter,
                compute_dtype=compute_dtype,
                min_num_params=min_num_params,
            ),
            **others,
        )


class DDPFullyShardedStrategy(FairscaleOptions, DDPFullyShardedNativeStrategy):
    """``fsdp_native`` with the options of Lightning's former fairscale strategy.

    Example:
        >>> strategy = DDPFullyShardedStrategy(reshard_after_forward=False, cpu_offload=True)
        >>> strategy.backend.sharding_strategy, strategy.backend.cpu_offload
        (<ShardingStrategy.SHARD_GRAD_OP: 2>, True)
    """


class FabricFullyShardedStrategy(FairscaleOptions, NativeFSDPStrategy):
    """What ``Fabric(strategy="ddp_fully_sharded")`` means: ``fsdp_native`` with fairscale's options.

    Example:
        >>> FabricFullyShardedStrategy(reshard_after_forward=False).backend.sharding_strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """


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


def refuse_fairscales_options(made: type, others: Mapping[str, object], **given: object) -> None:
    """Refuse options that only fairscale had, and unknown options, in one error.

    Args:
        made: The strategy's class.
        others: Other keyword arguments that its constructor received.
        **given: The values of options without a counterpart.

    Raises:
        UnsupportedCapabilityError: An option is refused.
    """
    told = [
        f"strategy 'ddp_fully_sharded' can't take {name}={value!r}, which only fairscale had.\n{instead}"
        for name, (default, instead) in _WITHOUT_COUNTERPART.items()
        if (value := given[name]) != default
    ]
    known = inspect.signature(made).parameters
    unknown = {name: value for name, value in others.items() if name not in known}
    try:
        refuse_unknown_options("ddp_fully_sharded", made, unknown, OTHER_OPTIONS, always=ALWAYS)
    except UnsupportedCapabilityError as error:
        told.append(str(error))
    if told:
        raise UnsupportedCapabilityError("\n".join(told))
