"""The options of ``strategy="xla_fsdp"``, the same under Trainer and Fabric."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch

from fsdp_core.sharding import ActivationCheckpointingPolicy, ShardingOptions, WrapPolicy, describe_policy, option
from fsdp_xla.options import check_options, check_sequential_save

__all__ = ["XLAFSDPOptions"]


@dataclass(frozen=True, kw_only=True)
class XLAFSDPOptions(ShardingOptions):
    """The options of both strategy classes.

    Raises:
        UnsupportedCapabilityError: A value can't be used, or contradicts another.
    """

    auto_wrap_policy: WrapPolicy | None = option("auto", part_of="units", describe=describe_policy)
    """Which submodules are gathered and freed together: a set of classes, a function ``module -> bool``, one of
    torch_xla's or torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s, or ``None`` for the
    root alone."""
    activation_checkpointing_policy: str | ActivationCheckpointingPolicy | None = option(
        None, part_of="units", describe=describe_policy
    )
    """Which submodules recompute their activations in the backward pass: a set of classes, a function ``module ->
    bool``, or ``"every_2"`` for every second repeated block, and so on."""
    sequential_save: bool = False
    """Whether the ranks of a host save one after another, so that only part of one rank's state is in host memory
    at a time."""
    timeout: timedelta | None = None
    """How long a rank waits for the others; ``hang_timeout`` when ``None``."""
    hang_timeout: timedelta | float | None = 1800.0
    """How long a rank waits for the others where ``timeout`` is ``None``, in seconds or as a timedelta. Then all
    raise, with the rank that did not come and the line where it is."""
    reshard_after_forward: bool = option(True, part_of="units")
    """Whether units free their parameters between forward and backward pass."""
    flatten_parameters: bool = option(False, part_of="units")
    """Whether a unit's parameters are flattened into one, for fewer collectives."""
    execute_sharding_on_init: bool = option(True, part_of="units")
    """Whether a unit is sharded immediately, and its full parameters freed."""
    optimization_barrier_in_forward: bool = option(True, part_of="units")
    """Whether a barrier keeps XLA from fusing a unit's forward pass with adjacent operations, which saves
    memory."""
    optimization_barrier_in_backward: bool = option(True, part_of="units")
    """The same for its backward pass."""
    sync_on_finalization: bool = option(False, part_of="units")
    """Whether forward and backward pass run as a program separate from the optimizer step."""
    disable_reshard_on_root: bool = option(True, part_of="units")
    """Whether the root's parameters are kept between forward and backward pass."""
    compute_dtype: torch.dtype | None = option(None, part_of="units")
    """The dtype to compute in; ``None``: chosen by ``precision``."""
    buffer_dtype: torch.dtype | None = option(None, part_of="units")
    """The dtype of floating-point buffers; ``None``: they keep their own."""
    fp32_reduce_scatter: bool = option(False, part_of="units")
    """Whether gradients are reduced in fp32 if ``compute_dtype`` is another dtype."""
    shard_param_on_dim_0: bool = option(False, part_of="units")
    """Whether parameters are sharded along their first dimension instead of flattened."""
    pin_layout_in_collective_ops: bool = option(False, part_of="units")
    """Whether layouts are pinned in collectives; not on the CPU."""
    reduce_scatter_bucket_size_mb: int | None = option(0, part_of="units")
    """The size of buckets in which gradients are reduced; 0: no buckets."""
    coalesce_all_gather_ops: bool = option(False, part_of="units")
    """Whether a unit's parameters are gathered in one collective; needs ``shard_param_on_dim_0``."""

    def __post_init__(self) -> None:
        check_sequential_save(self.sequential_save, self.async_save)
        check_options(self.wrapper_arguments())

    @classmethod
    def wrapper_argument_names(cls) -> list[str]:
        """The options that torch_xla's ``XlaFullyShardedDataParallel`` takes as arguments, in its order."""
        common_names = {option_field.name for option_field in fields(ShardingOptions)}
        own_names = {"auto_wrap_policy", "activation_checkpointing_policy", "sequential_save"}
        return [name for name in XLAFSDPOptions.__annotations__ if name not in common_names | own_names]

    def wrapper_arguments(self) -> dict[str, Any]:
        """The wrapper's arguments. It has defaults for the options that are ``None``."""
        values = {name: getattr(self, name) for name in self.wrapper_argument_names()}
        return {name: value for name, value in values.items() if value is not None}
