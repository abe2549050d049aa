"""What torch's two libraries of sharded units have decided for a unit, which has no public name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = ["flattens_original_parameters", "ranks_after_forward"]


def ranks_after_forward(unit: FSDPModule) -> int | None:
    """Over how many ranks ``fully_shard`` keeps a unit sharded from its forward to its backward pass.

    Args:
        unit: A unit that has run.

    Returns:
        The ranks; ``None`` if it stays gathered.
    """
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group before torch 2.11
    info = None if groups[0] is None else groups[0].post_forward_mesh_info
    return None if info is None else int(info.shard_mesh_size)


def flattens_original_parameters(unit: nn.Module) -> bool:
    """Whether FSDP1 keeps the parameters that a unit flattens, each at a multiple of 16 bytes.

    Args:
        unit: A unit that it has wrapped.
    """
    return isinstance(unit, FullyShardedDataParallel) and bool(unit._use_orig_params)
