"""Parameters that are frozen or unfrozen between passes: what is gathered follows its shards."""

from __future__ import annotations

import operator
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_core.sharding import without_torch_function
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of, trainable_params

__all__ = [
    "HELD",
    "REQUIRED",
    "SEEN",
    "carry_requires_grad",
    "take_requires_grad",
    "take_unfrozen",
    "update_requires_grad",
]


SEEN = "_fsdp_fsdp2_requires_grad"

#: Whether shards, and what modules hold instead by state of a unit, require gradients.
REQUIRED = operator.attrgetter("sharded_param.requires_grad")

HELD = {
    ShardedState.UNSHARDED: operator.attrgetter("_unsharded_param.requires_grad"),
    ShardedState.SHARDED_POST_FORWARD: operator.attrgetter("_sharded_post_forward_param.requires_grad"),
}


def carry_requires_grad(group: Any) -> None:
    """Copy ``requires_grad`` to shards from gathered parameters whose own was changed since they were gathered.

    ``fully_shard`` copies it from the shard when it gathers, and never back: a unit that stays gathered, as the last
    one and the root do, or sharded over fewer ranks, would forget that it was unfrozen.
    """
    previous, state = vars(group).get(SEEN), group._sharded_state
    if not previous or state is ShardedState.SHARDED:
        return
    with without_torch_function():  # a method of the parameters' class, if they are of a subclass, is not asked for
        current = list(map(HELD[state], group.fsdp_params))
    if current == previous:
        return
    for parameter, before, required in zip(group.fsdp_params, previous, current, strict=True):
        if required != before:
            parameter.sharded_param.requires_grad_(required)
    vars(group)[SEEN] = current


def take_requires_grad(unit: FSDPModule) -> None:
    """Let what a unit still has gathered, and what its next call computes with, be frozen as its shards are now."""
    for group in param_groups_of(unit):
        if group.is_unsharded:
            carry_requires_grad(group)
            _follow_shards(group)


def update_requires_grad(group: Any) -> None:
    """Let the gathered parameters of a unit and its shards agree on ``requires_grad``, whatever was changed last.

    A parameter that was frozen for a call and is unfrozen has a frozen gathered parameter until it is gathered again.
    """
    carry_requires_grad(group)
    if group.is_unsharded:
        _follow_shards(group)
        return
    try:
        with without_torch_function():
            if list(map(REQUIRED, group.fsdp_params)) == list(map(HELD[ShardedState.UNSHARDED], group.fsdp_params)):
                return
    except AttributeError:  # of one that was never gathered
        pass
    for parameter in trainable_params(group):
        if not parameter._unsharded_param.requires_grad:
            parameter._unsharded_param.requires_grad_(True)


def _follow_shards(group: Any) -> None:
    """Let what a unit has gathered be frozen and unfrozen as its shards were, which modules show between passes."""
    previous, required = vars(group).get(SEEN), list(map(REQUIRED, group.fsdp_params))
    if previous is None or required == previous:
        return
    for parameter, requires in zip(group.fsdp_params, required, strict=True):
        parameter._unsharded_param.requires_grad_(requires)
    vars(group)[SEEN] = required


def take_unfrozen(unit: FSDPModule) -> None:
    """Let a unit that was entirely frozen reduce gradients in the right dtype from now on.

    ``fully_shard`` chooses the dtype at the first forward pass, from the parameters that are trainable then. A unit
    without any gets no dtype, and under mixed precision its first backward pass after unfreezing fails.
    """
    for group in param_groups_of(unit):
        chosen = getattr(group, "_orig_dtype", None) is not None
        if not chosen and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()
