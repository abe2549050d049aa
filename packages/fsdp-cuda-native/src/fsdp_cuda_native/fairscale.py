"""``strategy="ddp_fully_sharded"``: ``fsdp_native`` under the name and with the options of fairscale's FSDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, cast, overload

import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.lightning import LightningOptions, takes
from fsdp_core.sharding import ShardingOptions, WrapPolicy, describe_policy, option
from fsdp_cuda_native.backend import NativeBackend
from fsdp_cuda_native.constructor import NativeStrategy
from fsdp_cuda_native.fabric import NativeFSDPStrategy
from fsdp_cuda_native.options import NativeOptions
from fsdp_cuda_native.trainer import DDPFullyShardedNativeStrategy

__all__ = ["DDPFullyShardedStrategy", "FabricFullyShardedStrategy", "FairscaleOptions"]

#: Fairscale's options without a counterpart, which take their default alone: what to write instead of another value.
_WITHOUT_COUNTERPART = {
    "flatten_parameters": "Parameters are always flattened; use strategy='fsdp2' to keep them apart.",
    "move_grads_to_cpu": "Gradients are where their shards are: write cpu_offload=True, or leave it out.",
    "bucket_cap_mb": "Leave it out: each unit is reduced at once.",
    "state_dict_to_cpu": "Leave it out: checkpoints never pass through a full copy on the device.",
}


@dataclass(frozen=True, kw_only=True)
class FairscaleOptions(NativeOptions):
    """Fairscale's options, beside those of ``fsdp_native``.

    Raises:
        UnsupportedCapabilityError: An option has no counterpart, or is given in its old and its new spelling.
    """

    flatten_parameters: bool = True
    """``True`` only."""
    reshard_after_forward: bool | None = None
    """Whether units free their parameters between forward and backward pass. ``None``: as ``sharding_strategy`` says,
    by default they do."""
    move_grads_to_cpu: bool | None = None
    """``None`` only; gradients follow ``cpu_offload``."""
    fp32_reduce_scatter: bool | None = None
    """Whether gradients are reduced in fp32 instead of ``compute_dtype``, if that is given; precision strings such
    as ``"16-mixed"`` always reduce in fp32."""
    compute_dtype: torch.dtype | None = None
    """The floating-point dtype to compute in; that of ``precision`` when ``None``."""
    bucket_cap_mb: int = 25
    """25 only; there are no buckets."""
    min_num_params: float | None = None
    """The number of parameters from which a submodule is a unit; ``None``: repeated blocks are units."""
    state_dict_to_cpu: bool = True
    """``True`` only."""
    mixed_precision: MixedPrecision | None = option(None, part_of="units")
    """A :class:`~torch.distributed.fsdp.MixedPrecision`; or ``compute_dtype``."""
    auto_wrap_policy: WrapPolicy | None = option("auto", part_of="units", describe=describe_policy)
    """As for ``fsdp_native``; or ``min_num_params``."""
    sharding_strategy: ShardingStrategy | str | None = None  # type: ignore[assignment]  # as_native replaces None
    """As for ``fsdp_native``; ``None``: chosen by ``reshard_after_forward``."""

    def __post_init__(self) -> None:
        refuse_fairscales_options(self)
        self.as_native  # noqa: B018  # raises if options contradict each other

    @cached_property
    def as_native(self) -> NativeOptions:
        """The options of ``fsdp_native`` that mean the same."""
        sharding_strategy, mixed_precision = self.sharding_strategy, self.mixed_precision
        auto_wrap_policy = self.auto_wrap_policy
        if self.reshard_after_forward is not None:
            _refuse_two_spellings(
                "reshard_after_forward", "sharding_strategy", are_both_given=sharding_strategy is not None
            )
            sharding_strategy = "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"
        if self.compute_dtype is not None:
            _check_dtype(self.compute_dtype)
            _refuse_two_spellings("compute_dtype", "mixed_precision", are_both_given=mixed_precision is not None)
            mixed_precision = MixedPrecision(
                param_dtype=self.compute_dtype,
                reduce_dtype=torch.float32 if self.fp32_reduce_scatter else self.compute_dtype,
                cast_forward_inputs=True,
            )
        if self.min_num_params is not None:
            _refuse_two_spellings("min_num_params", "auto_wrap_policy", are_both_given=auto_wrap_policy != "auto")
            _check_number(self.min_num_params)
            auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=int(self.min_num_params))
        values = {field.name: getattr(self, field.name) for field in fields(NativeOptions)}
        return NativeOptions(
            **values
            | {
                "sharding_strategy": "FULL_SHARD" if sharding_strategy is None else sharding_strategy,
                "mixed_precision": mixed_precision,
                "auto_wrap_policy": auto_wrap_policy,
            }
        )


#: The options that may be given by position, as to Lightning's former strategy.
_BY_POSITION = (
    *("accelerator", "cpu_offload", "flatten_parameters", "reshard_after_forward", "move_grads_to_cpu"),
    *("fp32_reduce_scatter", "compute_dtype", "bucket_cap_mb", "min_num_params", "state_dict_to_cpu"),
    *("parallel_devices", "cluster_environment", "checkpoint_io"),
)


@dataclass(frozen=True, kw_only=True)
class _Options(FairscaleOptions, LightningOptions): ...


class _FairscaleStrategy(NativeStrategy):
    strategy_name = "ddp_fully_sharded"
    options_class: ClassVar[type[ShardingOptions]] = _Options

    def new_backend(self) -> NativeBackend:
        return NativeBackend(cast(FairscaleOptions, self.options).as_native)

    @overload
    @takes(_Options)
    def __init__(self, **options: Any) -> None: ...
    @overload
    def __init__(self, first: object, /, *positional: Any, **options: Any) -> None: ...
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)


class DDPFullyShardedStrategy(_FairscaleStrategy, DDPFullyShardedNativeStrategy):
    """``fsdp_native`` with the options of Lightning's former fairscale strategy.

    Example:
        >>> strategy = DDPFullyShardedStrategy(reshard_after_forward=False, cpu_offload=True)
        >>> strategy.backend.options.strategy, strategy.backend.options.offloads
        (<ShardingStrategy.SHARD_GRAD_OP: 2>, True)
    """

    positional: ClassVar[Sequence[str]] = (*_BY_POSITION, "precision_plugin", "process_group_backend")


class FabricFullyShardedStrategy(_FairscaleStrategy, NativeFSDPStrategy):
    """What ``Fabric(strategy="ddp_fully_sharded")`` means: ``fsdp_native`` with fairscale's options.

    Example:
        >>> FabricFullyShardedStrategy(reshard_after_forward=False).backend.options.strategy
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """

    positional: ClassVar[Sequence[str]] = (*_BY_POSITION, "precision", "process_group_backend")


def _refuse_two_spellings(old: str, new: str, *, are_both_given: bool) -> None:
    if are_both_given:
        raise UnsupportedCapabilityError(
            f"{old} and {new} are an old and a new spelling of one option.\nWrite {new} alone."
        )


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UnsupportedCapabilityError(
            f"compute_dtype={dtype!r} is no floating-point dtype of torch's.\n"
            "Write compute_dtype=torch.bfloat16 or torch.float16; or leave it out, and write precision='bf16-mixed'."
        )


def _check_number(number: object) -> None:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 1 <= number < float("inf"):  # type: ignore[operator]  # it is a number then
        raise UnsupportedCapabilityError(
            f"min_num_params={number!r} is not a number of parameters.\n"
            "Write how many a submodule must have to be a unit, such as min_num_params=1e8; or leave it out: repeated "
            "blocks are units."
        )


def refuse_fairscales_options(options: FairscaleOptions) -> None:
    """Refuse options that only fairscale had, in one error.

    Args:
        options: All options.

    Raises:
        UnsupportedCapabilityError: An option is refused.
    """
    refused = [
        f"strategy 'ddp_fully_sharded' can't take {name}={value!r}, which only fairscale had.\n{instead}"
        for name, instead in _WITHOUT_COUNTERPART.items()
        if (value := getattr(options, name)) != getattr(FairscaleOptions, name)
    ]
    if refused:
        raise UnsupportedCapabilityError("\n".join(refused))
