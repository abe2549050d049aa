"""Gradients of earlier micro-batches that wait for their reduction, in units which the last backward pass does not visit.

With ``no_sync()`` FSDP1 leaves gradients unreduced at flat parameters, and the first backward pass after it reduces
those of the units that it visits. For another unit, ``_post_backward_final_callback`` fails an assertion; or, if the
unit also has reduced gradients, or is not sharded, ranks would silently go on with different gradients. Here the pass
reduces these units at its end, before FSDP1's own end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from fsdp_cuda_native.torch_private.flat_parameters.reduction_hooks import nodes_of
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, is_in_backward, units_in_passes
from fsdp_cuda_native.torch_private.passes.frozen_units import finish_frozen_units
from fsdp_cuda_native.torch_private.passes.unit_calls import tensors_in
from fsdp_cuda_native.torch_private.passes.unused_units import reduce_accumulated

__all__ = [
    "call_after_backward",
    "queue_reduction_of_waiting",
    "reduce_waiting_after",
    "reduce_waiting_units",
]


def reduce_waiting_units(root: FullyShardedDataParallel) -> None:
    """Let a backward pass that reduces gradients also reduce those of units that it does not visit."""
    root.module.register_forward_hook(partial(_reduce_waiting_after_call, weakref.ref(root)))


def _reduce_waiting_after_call(
    root_ref: weakref.ref[FullyShardedDataParallel], module: nn.Module, args: Any, output: Any
) -> None:
    root = root_ref()
    if root is not None and torch.is_grad_enabled():
        reduce_waiting_after(root, output)


def reduce_waiting_after(root: FullyShardedDataParallel, output: Any) -> None:
    """Let a backward pass that begins at an output reduce what waits, before FSDP1's own end of the pass.

    FSDP1 queues that in hooks of the same tensors, which it registers after these.
    """

    def queue(_: Tensor) -> None:
        if not is_in_backward(root):  # else another hook has queued it
            queue_reduction_of_waiting(root)
            torch.autograd.Variable._execution_engine.queue_callback(partial(finish_frozen_units, root))

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(queue)


def call_after_backward(root: FullyShardedDataParallel, output: Any, function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass of the root that begins at what it has returned."""

    def queue(_: Tensor) -> None:
        if not is_in_backward(root) and _adds_gradients(root):
            torch.autograd.Variable._execution_engine.queue_callback(function)

    for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            tensor.register_hook(queue)


def queue_reduction_of_waiting(root: FullyShardedDataParallel) -> None:
    """Reduce units with accumulated gradients at the end of the running backward pass, if it does not visit them."""
    state: Any = root
    waiting = [unit for unit in units_in_passes(root) if _has_waiting(unit)]
    if state._sync_gradients and waiting and _adds_gradients(root):
        torch.autograd.Variable._execution_engine.queue_callback(partial(_reduce_unvisited, waiting))


def _adds_gradients(root: FullyShardedDataParallel) -> bool:
    """Whether the backward pass that runs adds to gradients of flat parameters: ``torch.autograd.grad`` does not."""
    return any(torch._C._will_engine_execute_node(node) for unit in units_in_passes(root) for node in nodes_of(unit))


def _has_waiting(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit has gradients that no backward pass has reduced, and ``zero_grad()`` has not cleared.

    The answer is the same on all ranks.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    if not getattr(flat, "_post_backward_called", False):
        return False
    if handle._training_state != HandleTrainingState.BACKWARD_POST:  # the pass that runs has not visited it
        handle._reset_flat_param_grad_info_if_needed()
        flat._post_backward_called = flat.grad is not None
    return bool(flat._post_backward_called)


def _reduce_unvisited(waiting_units: Sequence[FullyShardedDataParallel]) -> None:
    for unit in waiting_units:
        handle: Any = handle_of(unit)
        if _is_reduced(handle):
            continue
        unit.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_PRE
        handle.prepare_gradient_for_backward()
        reduce_accumulated(unit)


def _is_reduced(handle: Any) -> bool:
    """Whether a backward pass has reduced the gradient of a unit for which :func:`_has_waiting` was true.

    FSDP1's training state does not always tell: a call of the unit inside the pass changes it.
    """
    flat = handle.flat_param
    if not flat.requires_grad:  # frozen since then: the pass itself reduces nothing
        return flat.grad is None
    if handle._training_state == HandleTrainingState.BACKWARD_POST:
        return True
    if not handle.uses_sharded_strategy:  # a reduced gradient looks the same, and may be averaged again
        return False
    return bool(flat.grad is None or flat.grad.shape != flat._unpadded_unsharded_size)
