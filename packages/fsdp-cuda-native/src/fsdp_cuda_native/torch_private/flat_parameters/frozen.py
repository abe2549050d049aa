"""Parameters that are frozen or unfrozen at other moments than between a backward pass and the next forward pass.

FSDP1 decides when the root is called whether a flat parameter requires a gradient
(``_reset_flat_param_grad_info_if_needed``), and makes all views of it alike: a frozen parameter's view has a gradient
as long as another parameter of the unit is trained, and no view has one if all were frozen at the call. For a backward
pass it sets the gradients of earlier passes aside (``_saved_grad_shard``), and at the end gives them back to units that
are trained and were visited (``_post_backward_final_callback``): a unit that was frozen meanwhile would keep its
gradient aside, where ``zero_grad()`` does not find it, and the first backward pass after unfreezing would add to it.

In plain torch ``requires_grad`` counts from the moment on at which it is set, and leaves gradients alone. So here the
flat parameter follows at each call of the unit, modules hold a detached view for each parameter that is frozen, and
frozen units get their gradients back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _register_post_backward_hook

from fsdp_core.sharding import without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters import units
from fsdp_cuda_native.torch_private.flat_parameters.reduction_hooks import drop_unfit_hook, waits_for_gradient
from fsdp_cuda_native.torch_private.flat_parameters.resharding import reshard
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, is_trained, needs_gradient

__all__ = ["FrozenViews", "finish_frozen_units", "follow_frozen", "follow_requires_grad", "restore_saved_gradients"]


class FrozenViews:
    """Lets a unit's gathered parameters follow what users freeze and unfreeze.

    Args:
        unit: The unit. Under ``use_orig_params=False``, where it is trained as a whole or not at all, nothing is done.
        views: Where its modules hold views, in the order of the flat parameter.
    """

    def __init__(self, unit: FSDP, views: Sequence[units.ParameterView]) -> None:
        self._unit_ref = weakref.ref(unit)
        self._handle = handle_of(unit)
        self._views = views

    def follow_requires_grad(self) -> None:
        """Let the flat parameter require a gradient if, when the unit is called, any of its parameters does.

        A flat parameter for whose gradient an earlier call waits goes on requiring it.
        """
        flat = self._handle.flat_param
        unit = self._unit_ref()
        if (
            flat._params is not None
            and unit is not None
            and (self._is_between_calls() or units.shows_parameters(unit))  # in a call it stays as the call has begun
        ):
            with without_torch_function():  # parameters may be guarded
                some_trained = any(map(is_trained, flat._params))
            if some_trained or not waits_for_gradient(flat):
                flat.requires_grad = some_trained
        drop_unfit_hook(flat)  # the end of the last backward pass leaves that of a unit that was frozen

    def _is_between_calls(self) -> bool:
        """Whether the unit is not being called: it is freed, or stays gathered for a backward pass."""
        return bool(self._handle.needs_unshard() or self._handle._skipped_use_sharded_views)

    def detach_frozen(self) -> None:
        """Let modules compute with detached views of the parameters that are frozen, and with views of the others."""
        params = self._handle.flat_param._params
        for index in range(len(params or ())):
            self._detach_if_frozen(index)

    def _detach_if_frozen(self, index: int) -> None:
        view = self._views[index]
        current = view.find()
        if not view.is_followed(current):
            return
        own_view = view.value.unfrozen(current)
        is_detached = current is not own_view
        if is_detached and view.value.is_trained():
            self._replace_view(index, view.value.replaced(current, own_view))
        elif not is_detached and not view.value.is_trained():
            self._replace_view(index, view.value.frozen(own_view) if needs_gradient(own_view) else own_view)

    def _replace_view(self, index: int, tensor: Tensor) -> None:
        """Let modules hold another view. No name is removed: the user's loop over parameters may be running."""
        flat = self._handle.flat_param
        if flat._tensors[index] is not None:  # while a unit stays gathered, FSDP1 asserts that modules hold this one
            flat._tensors[index] = tensor
        view = self._views[index]
        tied = [
            (info.module, info.param_name)
            for info in flat._shared_param_infos
            if (info.prim_module, info.prim_param_name) == (view.module, view.attribute)
        ]
        for owner, name in [(view.module, view.attribute), *tied]:
            if name in owner._parameters:
                owner._parameters[name] = tensor
            else:
                owner.__dict__[name] = tensor

    def set_requires_grad(self, index: int, *, requires_grad: bool) -> None:
        """Freeze or unfreeze a parameter whose view the user holds."""
        flat = self._handle.flat_param
        flat._params[index].requires_grad_(requires_grad)
        if requires_grad and not flat.requires_grad and not self._is_between_calls():
            self._renew_views()
        self._detach_if_frozen(index)

    def _renew_views(self) -> None:
        """Let a unit that was gathered while all of its parameters were frozen have a gradient from now on."""
        flat = self._handle.flat_param
        flat.requires_grad = True
        drop_unfit_hook(flat)
        with torch.enable_grad():
            new_tensors: list[Any] = list(self._handle._get_unflat_views())
        unit: Any = self._unit_ref()
        _register_post_backward_hook(unit, self._handle)
        for index, (view, tensor) in enumerate(zip(self._views, new_tensors, strict=True)):
            current = view.find()
            if view.is_followed(current):
                flat._tensors[index] = view.value.replaced(current, tensor)
                self._replace_view(index, flat._tensors[index])
                self._detach_if_frozen(index)


def follow_frozen(unit: FSDP) -> None:
    """Let a backward pass add no gradient to a unit that was frozen after its forward pass, as in plain torch."""
    handle = handle_of(unit)
    params = None if handle is None else handle.flat_param._params
    if params is not None:
        with without_torch_function():
            handle.flat_param.requires_grad = any(map(is_trained, params))
        drop_unfit_hook(handle.flat_param)


def follow_requires_grad(root: FSDP) -> bool:
    """Let flat parameters require gradients if any of their parameters does.

    Returns:
        Whether the root must be gathered again: only then do views of its flat parameter follow that.
    """
    root_handle = handle_of(root)
    required_gradient = root_handle is not None and root_handle.flat_param.requires_grad
    for unit in units.units_of(root):
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


def finish_frozen_units(root: FSDP) -> None:
    """Do what FSDP1's end of a backward pass leaves out for units that were frozen, or that the pass did not visit.

    Args:
        root: The root. FSDP1's own end of the backward pass is still to come.
    """
    state: Any = root
    units_of_root = units.units_in_passes(root)
    flat_params = [handle_of(unit).flat_param for unit in units_of_root]
    for flat in flat_params:
        drop_unfit_hook(flat)
        is_set_aside = hasattr(flat, "_saved_grad_shard")  # an earlier gradient
        if is_set_aside and flat._params is None and flat.requires_grad and state._sync_gradients:
            # let FSDP1 take the unit for visited: only then it gives a flat parameter that optimizers hold its gradient
            # back; original parameters hold theirs themselves
            flat._post_backward_called = True
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # after FSDP1's end, which is queued
    frozen_unsharded = [u for u in units_of_root if not (units.is_sharded(u) or handle_of(u).flat_param.requires_grad)]
    if frozen_unsharded:
        # they always have the memory of their shards, so FSDP1 takes them for resharded and leaves modules without
        # parameters: optimizers would hold others than those that the next call computes with
        queue_callback(partial(_reshard_all, frozen_unsharded))
    saved = [flat for flat in flat_params if not flat.requires_grad and hasattr(flat, "_saved_grad_shard")]
    if saved:
        # when the parameters are freed: a gradient must have the size of its parameter, the shard's
        queue_callback(partial(restore_saved_gradients, saved))


def _reshard_all(frozen_units: Iterable[FSDP]) -> None:
    for unit in frozen_units:
        reshard(unit)


def restore_saved_gradients(flat_params: Iterable[Any]) -> None:
    """Give frozen flat parameters back the reduced gradients that FSDP1 has set aside for a backward pass."""
    for flat in flat_params:
        if not flat.requires_grad and flat.grad is None and hasattr(flat, "_saved_grad_shard"):
            flat.grad = getattr(flat, "_cpu_grad", flat._saved_grad_shard)  # offloaded, it has a copy on the host
            del flat._saved_grad_shard
            flat._post_backward_called = False
