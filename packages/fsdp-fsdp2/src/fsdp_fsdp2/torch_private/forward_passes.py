"""Forward passes that are running: which do, and how they go on, or are given up, after a pass inside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils
from torch.distributed.fsdp import FSDPModule

from fsdp_fsdp2.torch_private.ordered_gathers import let_gathers_wait
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_in, param_groups_of

__all__ = [
    "abandon_forward",
    "end_backward",
    "is_idle",
    "recomputes",
    "resume_forward",
    "resume_states",
    "running_states",
]


def running_states(state: Any) -> list[Any]:
    """The states of the modules whose forward pass is running, without those that were sharded together with others."""
    return [
        module_state
        for module_state in state._state_ctx.all_states
        if module_state._training_state.name == "FORWARD" and len(module_state._modules) == 1
    ]


def resume_states(states: Sequence[Any], outermost_state: Any) -> None:
    """Let forward passes go on, although for torch a backward pass inside them has ended them.

    The streams that gather wait for the current one, as they do where torch begins a forward pass of the root: the
    pass inside may have ended with a gather that nobody used, whose buffer torch frees as if such a pass followed.

    Args:
        states: The states of their modules.
        outermost_state: The state of the module that was called first.
    """
    if states:
        let_gathers_wait(states[0]._comm_ctx, states[0]._device)
    for state in states:
        for group in param_groups_in(state):
            group.unshard()
            group.wait_for_unshard()
            group._training_state = type(group._training_state).FORWARD
        state._training_state = type(state._training_state).FORWARD
        state._state_ctx.iter_forward_root = outermost_state


def resume_forward(root: FSDPModule) -> None:
    """Let the root's forward pass go on after a backward pass or an optimizer's step by hand."""
    state: Any = root._get_fsdp_state()
    resume_states([state], state)


def is_idle(root: FSDPModule) -> bool:
    """Whether neither a forward nor a backward pass of the root runs."""
    state: Any = root._get_fsdp_state()
    return bool(state._training_state.name == "IDLE")


def end_backward(state: Any) -> None:
    """Call the callback that ``fully_shard`` registers for the end of a backward pass.

    From torch 2.15 on the callback reads a mode that its registration has set, and clears it. Here it may be missing.
    """
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    type(state)._root_post_backward_final_callback(state)


def abandon_forward(root: FSDPModule, units: Iterable[FSDPModule]) -> None:
    """Make units idle after an exception in a forward pass, as torch does, and leave gradients unchanged."""
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in param_groups_of(unit):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            group._training_state = type(group._training_state).IDLE
    root_state: Any = root._get_fsdp_state()
    root_state._state_ctx.iter_forward_root = None


def recomputes() -> bool:
    """Whether a backward pass is running in this thread, in which activation checkpointing may recompute a module."""
    return torch._C._current_graph_task_id() != -1
