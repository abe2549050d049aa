"""Units that are frozen or unfrozen between a forward pass and its backward pass, or between two backward passes.

FSDP1 prepares a unit for a backward pass by whether its flat parameter requires a gradient, sets the gradients of
earlier passes aside (``_saved_grad_shard``), and at the end of the pass gives them back to what is trained and was
visited (``_post_backward_final_callback``). A unit that was frozen meanwhile would keep its gradient aside, where
``zero_grad()`` does not find it, and the first backward pass after unfreezing would add to it. Here such units get
theirs back, as in plain torch, where freezing leaves gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_core.sharding import without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters.reduction_hooks import drop_unfit_hook, has_hook
from fsdp_cuda_native.torch_private.flat_parameters.resharding import reshard
from fsdp_cuda_native.torch_private.flat_parameters.units import (
    handle_of,
    is_sharded,
    is_trained,
    units_in_passes,
    units_of,
)
from fsdp_cuda_native.torch_private.flat_parameters.views import needs_gradient

__all__ = ["finish_frozen_units", "follow_frozen", "follow_requires_grad", "restore_saved_gradients"]


def follow_frozen(unit: FullyShardedDataParallel) -> None:
    """Let a backward pass add no gradient to a unit that was frozen after its forward pass, as in plain torch."""
    handle = handle_of(unit)
    params = None if handle is None else handle.flat_param._params
    if params is not None:
        with without_torch_function():
            handle.flat_param.requires_grad = any(map(is_trained, params))
        if has_hook(handle.flat_param):
            drop_unfit_hook(handle.flat_param)


def follow_requires_grad(root: FullyShardedDataParallel) -> bool:
    """Let flat parameters require gradients if any of their parameters does.

    Returns:
        Whether the root must be gathered again: only then do views of its flat parameter follow that.
    """
    root_handle = handle_of(root)
    required_gradient = root_handle is not None and root_handle.flat_param.requires_grad
    for unit in units_of(root):
        handle_of(unit)._reset_flat_param_grad_info_if_needed()
        drop_unfit_hook(handle_of(unit).flat_param)
    if root_handle is None:
        return False
    flat = root_handle.flat_param
    views = [getattr(info.module, info.param_name) for info in flat._param_infos]
    # a detached view of a frozen parameter stands for this one
    views = [vars(view).get("_fsdp_trained", view) for view in views]
    # views that were made of a frozen tensor may require a gradient by now, but FSDP1 has registered no hook for it
    views_require = required_gradient and any(map(needs_gradient, views))
    return views_require != bool(flat.requires_grad)


def finish_frozen_units(root: FullyShardedDataParallel) -> None:
    """Do what FSDP1's end of a backward pass leaves out for units that were frozen, or that the pass did not visit.

    Args:
        root: The root. FSDP1's own end of the backward pass is still to come.
    """
    state: Any = root
    units = units_in_passes(root)
    flat_params = [handle_of(unit).flat_param for unit in units]
    for flat in flat_params:
        drop_unfit_hook(flat)
        is_set_aside = hasattr(flat, "_saved_grad_shard")  # an earlier gradient
        if is_set_aside and flat._params is None and flat.requires_grad and state._sync_gradients:
            # let FSDP1 take the unit for visited: only then it gives a flat parameter that optimizers hold its gradient
            # back; original parameters hold theirs themselves
            flat._post_backward_called = True
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # after FSDP1's end, which is queued
    frozen_unsharded = [u for u in units if not (is_sharded(u) or handle_of(u).flat_param.requires_grad)]
    if frozen_unsharded:
        # they always have the memory of their shards, so FSDP1 takes them for resharded and leaves modules without
        # parameters: optimizers would hold others than those that the next call computes with
        queue_callback(partial(_reshard_all, frozen_unsharded))
    saved = [flat for flat in flat_params if not flat.requires_grad and hasattr(flat, "_saved_grad_shard")]
    if saved:
        # when the parameters are freed: a gradient must have the size of its parameter, the shard's
        queue_callback(partial(restore_saved_gradients, saved))


def _reshard_all(units: Iterable[FullyShardedDataParallel]) -> None:
    for unit in units:
        reshard(unit)


def restore_saved_gradients(flat_params: Iterable[Any]) -> None:
    """Give frozen flat parameters back the reduced gradients that FSDP1 has set aside for a backward pass."""
    for flat in flat_params:
        if not flat.requires_grad and flat.grad is None and hasattr(flat, "_saved_grad_shard"):
            flat.grad = getattr(flat, "_cpu_grad", flat._saved_grad_shard)  # offloaded, it has a copy on the host
            del flat._saved_grad_shard
            flat._post_backward_called = False
