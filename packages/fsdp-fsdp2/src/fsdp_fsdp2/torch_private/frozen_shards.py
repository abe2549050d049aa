"""Parameters that are frozen or unfrozen between passes: what is gathered follows its shards."""

from __future__ import annotations

import operator
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_core.sharding import without_torch_function
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of, trainable_params

__all__ = [
    "LAST_REQUIRES_GRAD",
    "SHARD_REQUIRES_GRAD",
    "SHOWN_REQUIRES_GRAD",
    "carry_requires_grad",
    "follow_shards",
    "init_dtypes_if_unfrozen",
    "update_requires_grad",
]


#: The attribute of a group with the ``requires_grad`` of each parameter when it was gathered, or last compared.
LAST_REQUIRES_GRAD = "_fsdp_fsdp2_requires_grad"

#: Whether a parameter's shard requires a gradient.
SHARD_REQUIRES_GRAD = operator.attrgetter("sharded_param.requires_grad")

#: Whether what modules hold instead of the shard does, by the state of the unit.
SHOWN_REQUIRES_GRAD = {
    ShardedState.UNSHARDED: operator.attrgetter("_unsharded_param.requires_grad"),
    ShardedState.SHARDED_POST_FORWARD: operator.attrgetter("_sharded_post_forward_param.requires_grad"),
}


def carry_requires_grad(group: Any) -> None:
    """Copy ``requires_grad`` to shards from gathered parameters whose own was changed since they were gathered.

    ``fully_shard`` copies it from the shard when it gathers, and never back. A unit that stays gathered between passes,
    as the last one and the root do, or sharded over fewer ranks, would forget that the user has unfrozen it.
    """
    previous, state = vars(group).get(LAST_REQUIRES_GRAD), group._sharded_state
    if not previous or state is ShardedState.SHARDED:
        return
    with without_torch_function():  # or a subclass of Tensor would be called for each attribute
        current = list(map(SHOWN_REQUIRES_GRAD[state], group.fsdp_params))
    if current == previous:
        return
    for parameter, required_before, requires in zip(group.fsdp_params, previous, current, strict=True):
        if requires != required_before:
            parameter.sharded_param.requires_grad_(requires)
    vars(group)[LAST_REQUIRES_GRAD] = current


def follow_shards(unit: FSDPModule) -> None:
    """Freeze and unfreeze what a unit still has gathered, with which its next call computes, as its shards are now."""
    for group in param_groups_of(unit):
        if group.is_unsharded:
            carry_requires_grad(group)
            _copy_from_shards(group)


def update_requires_grad(group: Any) -> None:
    """Let the gathered parameters of a unit and its shards agree on ``requires_grad``: what was changed last counts.

    A unit that is freed is unfrozen too: if it was called while it was frozen, its gathered parameters, in which the
    backward pass accumulates, would stay frozen until it is gathered again.
    """
    carry_requires_grad(group)
    if group.is_unsharded:
        _copy_from_shards(group)
        return
    try:
        with without_torch_function():
            if list(map(SHARD_REQUIRES_GRAD, group.fsdp_params)) == list(
                map(SHOWN_REQUIRES_GRAD[ShardedState.UNSHARDED], group.fsdp_params)
            ):
                return
    except AttributeError:  # a parameter was never gathered
        pass
    for parameter in trainable_params(group):
        if not parameter._unsharded_param.requires_grad:
            parameter._unsharded_param.requires_grad_(True)


def _copy_from_shards(group: Any) -> None:
    """Freeze and unfreeze what a unit has gathered as its shards, which users see between passes."""
    previous, required = vars(group).get(LAST_REQUIRES_GRAD), list(map(SHARD_REQUIRES_GRAD, group.fsdp_params))
    if previous is None or required == previous:
        return
    for parameter, requires in zip(group.fsdp_params, required, strict=True):
        parameter._unsharded_param.requires_grad_(requires)
    vars(group)[LAST_REQUIRES_GRAD] = required


def init_dtypes_if_unfrozen(unit: FSDPModule) -> None:
    """Let a unit that was entirely frozen reduce gradients in the right dtype from now on.

    ``fully_shard`` chooses the dtype at the first forward pass, from the parameters that are trainable then. A unit
    without any gets no dtype, and under mixed precision its first backward pass after unfreezing fails.
    """
    for group in param_groups_of(unit):
        has_dtype = getattr(group, "_orig_dtype", None) is not None
        if not has_dtype and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()
