"""Parameters that are frozen or unfrozen while they are gathered, or between two calls.

FSDP1 decides when the root is called whether a flat parameter requires a gradient
(``_reset_flat_param_grad_info_if_needed``), and makes all views of it alike: a frozen parameter's view has a gradient as
long as another parameter of the unit is trained, and no view has one if all were frozen at the call. In plain torch
``requires_grad`` counts from the moment on at which it is set. So here the flat parameter follows at each call of the
unit, and modules hold a detached view for each parameter that is frozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _register_post_backward_hook

from fsdp_core.sharding import without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters.reduction_hooks import drop_unfit_hook, waits_for_gradient
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, is_trained
from fsdp_cuda_native.torch_private.flat_parameters.views import ParameterView, needs_gradient, shows_parameters

__all__ = ["FrozenViews"]


class FrozenViews:
    """Lets a unit's gathered parameters follow what users freeze and unfreeze.

    Args:
        unit: The unit. Under ``use_orig_params=False``, where it is trained as a whole or not at all, nothing is done.
        views: Where its modules hold views, in the order of the flat parameter.
    """

    def __init__(self, unit: FullyShardedDataParallel, views: Sequence[ParameterView]) -> None:
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
            and (self._is_between_calls() or shows_parameters(unit))  # a call has begun with what it requires
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
