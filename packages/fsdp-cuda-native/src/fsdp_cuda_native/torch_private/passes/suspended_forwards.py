"""Backward passes and steps inside the root's forward pass, as manual optimization takes them.

FSDP1 expects a backward pass to begin at what the root has returned: ``_post_forward`` registers the hook on it, frees
the root and makes it idle, and ``_root_pre_forward`` begins the next forward pass. Under Lightning a whole
``training_step`` runs inside the root's ``forward()``, and a manual one runs backward passes and optimizer steps there.
Here the root's part of the forward pass is ended before each, as if the root had returned the loss, and begun again
after it, with the parameters' current values. Units that an earlier call in the step has used go on waiting for a
backward pass of their own: they are *pending*.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from fsdp_cuda_native.torch_private.flat_parameters import reduction_hooks
from fsdp_cuda_native.torch_private.flat_parameters.frozen import finish_frozen_units, restore_saved_gradients
from fsdp_cuda_native.torch_private.flat_parameters.resharding import reshard
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, units_of
from fsdp_cuda_native.torch_private.passes.unvisited_units import queue_waiting, reduce_waiting_after

__all__ = [
    "PendingUnit",
    "begin_backward_inside",
    "expect_backward",
    "forget_pending",
    "leave_gradients",
    "make_units_idle",
    "no_reduction",
    "note_hooks_of",
    "reset_units",
    "resume_forward",
    "suspend_forward",
]


@dataclass(kw_only=True)
class PendingUnit:
    """A unit that waits for a backward pass inside a running forward pass of the root.

    Attributes:
        unit: The unit.
        node: The autograd node that accumulates its flat parameter's gradient; ``None`` for a frozen unit.
        hook: Our hook at the node, which reduces the gradient. FSDP1 removes its own after the first backward pass.
    """

    unit: FSDP
    node: Any | None
    hook: Any | None = None


def suspend_forward(root: FSDP, loss: Tensor | None, pending: list[PendingUnit]) -> None:
    """End the root's part of a running forward pass, as if the root had returned ``loss``.

    Args:
        root: The root.
        loss: The tensor from which a backward pass starts, if one follows.
        pending: The units that wait for a backward pass; those that wait since the last call are appended.
    """
    for unit in units_of(root):
        handle = handle_of(unit)
        flat = handle.flat_param
        handle._reset_flat_param_grad_info_if_needed()
        reduction_hooks.drop_unfit_hook(flat)
        node = flat._post_backward_hook_state[0] if reduction_hooks.waits_for_gradient(flat) else None
        is_known = any(entry.unit is unit and entry.node is node for entry in pending)
        if not is_known and (node is not None or handle._needs_pre_backward_unshard):
            pending.append(PendingUnit(unit=unit, node=node))
    if root.training_state == TrainingState.FORWARD_BACKWARD:
        leave_gradients(root)
        reduce_waiting_after(root, loss)
        _runtime_utils._post_forward(root, handle_of(root), _runtime_utils._post_forward_reshard, root, None, loss)


def resume_forward(root: FSDP, pending: list[PendingUnit]) -> None:
    """Begin the root's part of a forward pass again, with the parameters' current values.

    Args:
        root: The root.
        pending: The units that another backward pass may still visit.
    """
    for unit in units_of(root):
        reshard(unit)  # a unit that was prefetched for a backward pass but not used would look modified
        restore_saved_gradients([handle_of(unit).flat_param])
    if handle_of(root) is not None:
        reduction_hooks.drop_hook(handle_of(root).flat_param)
    _runtime_utils._root_pre_forward(root, root, (), {})
    _runtime_utils._pre_forward(root, handle_of(root), _runtime_utils._pre_forward_unshard, root, (), {})
    for entry in pending:
        if entry.unit is not root:
            handle_of(entry.unit)._needs_pre_backward_unshard = True
        if entry.node is not None and entry.hook is None:
            entry.hook = entry.node.register_hook(partial(_reduce_once, entry.unit, entry.node))


def _reduce_once(unit: FSDP, node: Any, *gradients: Any) -> None:
    """Reduce a unit's gradient at a node, unless FSDP1's hook at the same node must be the only one.

    Usually a second reduction finds nothing to reduce. But where users' hooks are called, FSDP1 has already given
    parameters their gradients.
    """
    handle = handle_of(unit)
    if not (handle._has_optim_in_backward and any(last_node is node for last_node in reduction_hooks.nodes_of(unit))):
        _runtime_utils._post_backward_hook(unit, handle, *gradients)


def forget_pending(root: FSDP, pending: list[PendingUnit]) -> None:
    """Stop all units from waiting for a backward pass.

    The next forward pass would reuse the nodes that they wait at, but under mixed precision it has other nodes.
    """
    for unit in units_of(root):
        reduction_hooks.drop_hook(handle_of(unit).flat_param)
        handle_of(unit)._needs_pre_backward_unshard = False
    for entry in pending:
        if entry.hook is not None:
            entry.hook.remove()


def begin_backward_inside(root: FSDP, suspend: Callable[[Tensor | None], None], resume: Callable[[], None]) -> None:
    """Begin a backward pass of the root inside its forward pass, when the root has no output yet for hooks.

    Args:
        root: The root.
        suspend: Suspends the forward pass; takes the loss, which is not known here.
        resume: Lets the forward pass go on. Called at the end of the backward pass, after FSDP1's own end.
    """
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    with torch.enable_grad():  # a backward pass disables gradients
        suspend(None)
    expect_backward(root)
    queue_waiting(root)
    queue_callback(partial(finish_frozen_units, root))
    _runtime_utils._pre_backward_hook(root, root.module, handle_of(root), None)
    queue_callback(torch.enable_grad()(resume))  # the callback is called without gradients too


def expect_backward(root: FSDP) -> None:
    """Let a root whose forward pass is suspended begin a backward pass."""
    handle = handle_of(root)
    if handle is not None:
        handle._ran_pre_backward_hook = False
        handle._needs_pre_backward_unshard = True


def note_hooks_of(loss: Tensor) -> Callable[[], None]:
    """Note which hooks a tensor has.

    Returns:
        A function that removes the hooks that were added since. FSDP1's, on the root's output, would begin a backward
        pass of the root each time that a retained graph is used again.
    """
    keys_before = set(loss._backward_hooks or ())
    loss_ref = weakref.ref(loss)

    def remove_added() -> None:
        tensor = loss_ref()
        hooks = {} if tensor is None else tensor._backward_hooks or {}
        for key in set(hooks) - keys_before:
            del hooks[key]

    return remove_added


def leave_gradients(root: FSDP) -> None:
    """Keep the end of a forward pass from restoring gradients that ``zero_grad()`` has cleared during it.

    FSDP1 shows the gradients of the shard when it frees a unit after a forward pass, and not when the unit is idle.
    """
    if handle_of(root) is not None:
        handle_of(root)._training_state = HandleTrainingState.IDLE


@contextmanager
def no_reduction(root: FSDP) -> Iterator[None]:
    """Like ``root.no_sync()``, which does not allow a backward pass inside the root's forward pass."""
    units: list[Any] = FSDP.fsdp_modules(root)
    settings = [unit._sync_gradients for unit in units]
    for unit in units:
        unit._sync_gradients = False
    try:
        yield
    finally:
        for unit, setting in zip(units, settings, strict=True):
            unit._sync_gradients = setting


def make_units_idle(root: FSDP) -> None:
    """Make units idle after an exception in a forward pass, and leave gradients unchanged."""
    for unit in FSDP.fsdp_modules(root):
        unit.training_state = TrainingState.IDLE
        if handle_of(unit) is not None:
            handle_of(unit)._training_state = HandleTrainingState.IDLE


def reset_units(root: FSDP) -> None:
    """Make every unit idle and sharded after an exception in any pass. Gradients must have been dropped."""
    state: Any = root
    state._post_backward_callback_queued = False
    state._exec_order_data.next_iter()
    make_units_idle(root)
    units: list[Any] = FSDP.fsdp_modules(root)
    for unit in units:
        unit._sync_gradients = True
        handle = handle_of(unit)
        if handle is None:
            continue
        flat = handle.flat_param
        reduction_hooks.drop_hook(flat)
        flat._post_backward_called = False
        handle._ran_pre_backward_hook = False
        handle._needs_pre_backward_unshard = False
        handle._post_forward_index = None
        reshard(unit)
        with torch.no_grad():
            handle._reset_flat_param_grad_info_if_needed()
