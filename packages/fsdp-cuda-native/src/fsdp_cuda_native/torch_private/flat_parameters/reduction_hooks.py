"""The autograd hook at which FSDP1 reduces a unit's gradient.

When a unit is called, ``_register_post_backward_hook`` registers ``_post_backward_hook`` at the autograd node that
accumulates the flat parameter's gradient, and keeps node and hook in ``_post_backward_hook_state``, until the backward
pass ends. For a frozen unit it keeps a hook alone, at the unit's inputs. It does nothing at a unit's further calls.
That is wrong where several nodes add to the gradient: under mixed precision each all-gather makes another node, so that
a backward pass through a later call alone would reduce nothing, and one through both calls only half of the gradient.
Here one hook on all of these nodes reduces at the last of them. It is also wrong where a unit was frozen or unfrozen
since its hook was registered; such hooks are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _post_backward_hook, _register_post_backward_hook

from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = [
    "drop_hook",
    "drop_unfit_hook",
    "has_hook",
    "new_nodes_of",
    "nodes_of",
    "reduce_at",
    "reduce_at_last_node",
    "waits_for_gradient",
]

#: The attribute of a flat parameter with what FSDP1 keeps of its hook.
_STATE = "_post_backward_hook_state"

#: The attribute of a unit with the id of the first hook of its nodes, and how many nodes :func:`new_nodes_of` returned.
_KNOWN_NODES = "_fsdp_cuda_native_hooked_nodes"


def has_hook(flat: Any) -> bool:
    """Whether FSDP1 has a hook for a flat parameter, trained or frozen."""
    return hasattr(flat, _STATE)


def waits_for_gradient(flat: Any) -> bool:
    """Whether FSDP1 has a hook that reduces a flat parameter's gradient: a frozen one's has no node."""
    return len(getattr(flat, _STATE, ())) == 2


def nodes_of(unit: FSDP) -> Sequence[Any]:
    """The autograd nodes that add to the gradient of a unit's flat parameter, if FSDP1 has a hook at one of them."""
    handle = handle_of(unit)
    if handle is None or not waits_for_gradient(handle.flat_param):
        return ()
    node, hook = handle.flat_param._post_backward_hook_state
    return tuple(hook.nodes) if isinstance(hook, _HookOfNodes) else (node,)


def new_nodes_of(unit: FSDP) -> Sequence[Any]:
    """Those of :func:`nodes_of` a unit that were added since this function was called last."""
    nodes = nodes_of(unit)
    if not nodes:
        return ()
    hook = handle_of(unit).flat_param._post_backward_hook_state[1]
    hook_id = getattr(hook, "first", hook).id  # unlike the id of a node, never used again
    last_hook_id, known = unit.__dict__.get(_KNOWN_NODES, (None, 0))
    unit.__dict__[_KNOWN_NODES] = hook_id, len(nodes)
    return nodes[known:] if last_hook_id == hook_id else nodes


def drop_hook(flat: Any) -> None:
    """Remove FSDP1's hook of a flat parameter, if there is one."""
    if has_hook(flat):
        flat._post_backward_hook_state[-1].remove()
        del flat._post_backward_hook_state


def drop_unfit_hook(flat: Any) -> None:
    """Remove FSDP1's hook of a flat parameter that was frozen or unfrozen since the hook was registered."""
    if waits_for_gradient(flat) != flat.requires_grad:
        drop_hook(flat)


def reduce_at(unit: FSDP, node: Any) -> None:
    """Let a node reduce a unit's gradient, if FSDP1 has dropped its hook after another backward pass.

    Args:
        unit: The unit.
        node: A node that is about to add to the gradient of its flat parameter.
    """
    flat = handle_of(unit).flat_param
    if not has_hook(flat):
        hook = node.register_hook(partial(_post_backward_hook, unit, handle_of(unit)))
        flat._post_backward_hook_state = node, hook


def reduce_at_last_node(unit: FSDP) -> None:
    """Reduce a unit's gradient at the last of several nodes that add to it, among them that of what is gathered now.

    Args:
        unit: The unit, which is gathered.
    """
    flat = handle_of(unit).flat_param
    _register_post_backward_hook(unit, handle_of(unit))
    if not waits_for_gradient(flat) or not flat.requires_grad:
        return
    grad_fn: Any = flat.expand_as(flat).grad_fn
    node = grad_fn.next_functions[0][0]  # as FSDP1 finds the node, which autograd shows in no other way
    last_node, hook = flat._post_backward_hook_state
    if node is last_node:
        return
    if not isinstance(hook, _HookOfNodes):  # FSDP1's, at one node
        hook.remove()
        hook = _HookOfNodes(unit, first=hook)
        hook.add(last_node)
    hook.add(node)
    flat._post_backward_hook_state = (node, hook)


class _HookOfNodes:
    """A hook on several autograd nodes, which reduces a unit's gradient at the last of those that a pass runs.

    Args:
        unit: The unit.
        first: The hook of FSDP1 that this one replaces.

    Attributes:
        first: That hook.
        nodes: The nodes.
    """

    def __init__(self, unit: FSDP, first: Any) -> None:
        self._unit_ref = weakref.ref(unit)
        self.first = first
        self.nodes: list[Any] = []
        self._hooks: list[Any] = []
        #: The indices of the nodes that the running pass has reached.
        self._reached: set[int] = set()

    def add(self, node: Any) -> None:
        """Add a node to wait for."""
        self._hooks.append(node.register_hook(partial(self._reach, len(self.nodes))))
        self.nodes.append(node)

    def remove(self) -> None:
        """Remove the hook."""
        for hook in self._hooks:
            hook.remove()

    def _reach(self, index: int, *gradients: Any) -> None:
        self._reached.add(index)
        if all(
            node_index in self._reached or not torch._C._will_engine_execute_node(node)
            for node_index, node in enumerate(self.nodes)
        ):
            self._reached.clear()
            unit = self._unit_ref()
            if unit is not None:
                _post_backward_hook(unit, handle_of(unit), *gradients)
