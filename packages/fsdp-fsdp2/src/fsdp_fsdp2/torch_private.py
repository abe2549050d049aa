"""The private names of torch that this package uses, each with its reason. Checked on torch 2.9.0 and 2.13.0."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

__all__ = ["finish_backward", "take_unfrozen"]


def finish_backward(root: FSDPModule) -> None:
    """Do what ``fully_shard`` does at the end of a backward pass: reduce what is left to reduce, and reshard.

    It registers this as a callback when a gradient reaches the output of a unit that it has run forward. A backward
    pass inside the root's forward pass that touches the root's own parameters alone reaches no such output, so their
    gradients would never arrive at the shards. Doing it twice does nothing the second time.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def take_unfrozen(unit: FSDPModule) -> None:
    """Let a unit that was frozen as a whole reduce gradients in the right dtype from now on.

    ``fully_shard`` chooses the dtype at the first forward pass, from the parameters that are trainable then; a unit
    that has none keeps no dtype, and under mixed precision its first backward pass after an unfreezing fails.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one group before torch 2.11
    for group in groups:
        chosen = group is None or getattr(group, "_orig_dtype", None) is not None
        if not chosen and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()
