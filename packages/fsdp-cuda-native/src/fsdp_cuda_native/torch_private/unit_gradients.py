"""A unit's gradients: those reduced to its shard, and unreduced ones at the flat parameter.

After a backward pass FSDP1 gives ``flat_param.grad`` the reduced gradient, in the shape of the shard, and each
parameter a view of it (``_use_sharded_grad_views``). Under ``no_sync()``, ``flat_param.grad`` is an unreduced gradient
of all elements instead; the reduced one of earlier passes is set aside (``_saved_grad_shard``), and parameters get
views of the unreduced one (``_use_unsharded_grad_views``). FSDP1 gives frozen parameters none, also of a gradient that
they had before: here they keep it. And here gradients of both kinds are read and restored, for checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_core.sharding import outside_of_compilation, show_gradient_elsewhere, without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, is_trained

__all__ = [
    "drop_gradients",
    "keep_gradients_of_frozen",
    "reduced_gradient",
    "saved_gradient",
    "set_reduced_gradient",
    "set_unreduced_gradients",
    "unreduced_gradients",
    "zero_gradient",
]


def keep_gradients_of_frozen(unit: FSDP) -> None:
    """Let parameters that are frozen keep the gradients that they have, as in plain torch.

    FSDP1 drops them at the end of the next forward pass, and sets them to zero in the flat parameter's gradient: what
    was accumulated before parameters were frozen for a call would be lost. Copies are shown instead, because FSDP1 also
    adds the gradients of frozen parameters to that of the flat parameter. When FSDP1 gathers, it takes the copies back.

    Args:
        unit: The unit.
    """
    handle = handle_of(unit)
    if handle._use_orig_params:
        shown_gradients = _ShownGradients(handle, weakref.ref(unit))
        handle._use_sharded_grad_views = shown_gradients.show_when_freed
        handle._use_unsharded_grad_views = shown_gradients.show_unreduced


class _ShownGradients:
    """The gradients that a unit's parameters show, and those that they keep while they are frozen.

    Args:
        handle: The handle of the unit's flat parameter.
        unit_ref: The unit, held weakly.
    """

    def __init__(self, handle: Any, unit_ref: weakref.ref[Any]) -> None:
        self._handle_ref = weakref.ref(handle)
        self._unit_ref = unit_ref
        #: For each parameter, the gradient that it has shown last, if it was trained then.
        self._last_shown: list[weakref.ref[Tensor] | None] = [None] * len(handle.flat_param._params)
        #: The indices of frozen parameters whose gradients are copies already.
        self._copied: set[int] = set()
        #: The indices of parameters whose gradients are not reduced yet.
        self._unreduced: set[int] = set()
        infos = handle.flat_param._shard_param_infos
        #: The indices of parameters of which this rank holds no element.
        self._without_elements = [index for index, info in enumerate(infos) if not info.in_shard]

    @outside_of_compilation
    def show_when_freed(self) -> None:
        """Show gradients after the parameters were freed. Replaces the handle's ``_use_sharded_grad_views``."""
        handle: Any = self._handle_ref()
        flat = handle.flat_param
        with without_torch_function():
            waits_for_reduction = (
                handle.uses_sharded_strategy
                and flat.grad is not None
                and flat.grad.shape == flat._unpadded_unsharded_size
            )
            if waits_for_reduction:
                handle._use_unsharded_grad_views()  # after module.to()
            else:
                self.show()
        self._show_elsewhere()

    def _show_elsewhere(self) -> None:
        """Let parameters of which this rank holds no element show whether other ranks have a gradient for them."""
        handle: Any = self._handle_ref()
        flat = handle.flat_param
        if not self._without_elements:
            return
        has_gradient = handle.sharded_grad is not None
        if not has_gradient and len(self._without_elements) == len(flat._params):
            return  # nothing tells: FSDP1 drops the unit's gradient on a rank where no parameter shows one
        for index in self._without_elements:
            parameter = flat._params[index]
            is_shown = has_gradient and parameter.requires_grad and not flat._is_grad_none_mask[index]
            show_gradient_elsewhere(parameter, is_shown)

    def show(self) -> None:
        """Show reduced gradients, as FSDP1 does when nothing waits for a reduction; frozen parameters keep theirs."""
        handle: Any = self._handle_ref()
        params = handle.flat_param._params
        kept_gradients = {} if all(map(is_trained, params)) else self._gradients_of_frozen(params)
        reduced_now = self._take_frozen_before_reduction(params)
        type(handle)._use_sharded_grad_views(handle)
        self._note_shown(params)
        if reduced_now or kept_gradients:
            self._wait_for_reduction()
        for index in reduced_now:
            kept_gradients.pop(index, None)
            if handle.uses_sharded_strategy:
                self._copied.discard(index)  # a part of the reduced gradient, which is copied below
            else:  # the gradient is shown itself, not a copy: FSDP1 may still reduce it in place
                self._copied.add(index)
                self._unreduced.add(index)
            gradient = self._part_of_reduced(index)
            if gradient is not None:
                kept_gradients[index] = gradient
        for index, gradient in kept_gradients.items():
            if index not in self._copied:
                gradient = gradient.clone()
            params[index].grad = gradient
            self._last_shown[index] = weakref.ref(gradient)
        self._copied = set(kept_gradients)

    def _gradients_of_frozen(self, params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """The gradients that frozen parameters have, by index, without those that users have assigned."""
        gradients: dict[int, Tensor] = {}
        for index, (parameter, shown_ref) in enumerate(zip(params, self._last_shown, strict=True)):
            gradient = None if parameter.requires_grad else parameter.grad
            if gradient is not None and shown_ref is not None and shown_ref() is gradient:
                gradients[index] = gradient
        return gradients

    def _take_frozen_before_reduction(self, params: Sequence[nn.Parameter]) -> list[int]:
        """The indices of parameters that were frozen between a backward pass and the reduction, which is done now.

        From then on, no parameter waits for the reduction.
        """
        indices = [i for i in self._unreduced if params[i].grad is not None and not params[i].requires_grad]
        self._unreduced = set()
        return indices

    def _wait_for_reduction(self) -> None:
        """Let the current stream of an accelerator wait for the one in which gradients are reduced."""
        unit, handle = self._unit_ref(), self._handle_ref()
        assert handle is not None  # it is the caller
        if handle.device.type != "cpu" and unit is not None and hasattr(unit, "_post_backward_stream"):
            unit._device_handle.current_stream().wait_stream(unit._post_backward_stream)

    def _part_of_reduced(self, index: int) -> Tensor | None:
        """This rank's part of a parameter's reduced gradient; ``None`` if it has none."""
        handle: Any = self._handle_ref()
        flat = handle.flat_param
        info = flat._shard_param_infos[index]
        reduced: Tensor | None = handle.sharded_grad
        if reduced is None or not info.in_shard:
            return None
        part = reduced[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        parameter = flat._params[index]
        return part.view(parameter.shape).to(parameter.dtype)

    def show_unreduced(self) -> None:
        """Show gradients before they are reduced; without sharding, also afterwards, because they stay in place.

        Replaces the handle's ``_use_unsharded_grad_views``.
        """
        handle: Any = self._handle_ref()
        with without_torch_function():  # a parameter may be guarded as a piece, to which no full gradient belongs
            type(handle)._use_unsharded_grad_views(handle)
        params = handle.flat_param._params
        if not handle.uses_sharded_strategy:
            self._note_shown(params)
        if handle.flat_param.grad is None:
            self._unreduced.clear()
        else:
            self._unreduced.update(index for index, parameter in enumerate(params) if parameter.requires_grad)

    def _note_shown(self, params: Sequence[nn.Parameter]) -> None:
        """Note which gradients trained parameters show."""
        for index, parameter in enumerate(params):
            gradient = parameter.grad if parameter.requires_grad else None
            self._last_shown[index] = None if gradient is None else weakref.ref(gradient)


def unreduced_gradients(unit: FSDP) -> dict[tuple[nn.Module, str], Tensor]:
    """The gradients that a unit has accumulated without reducing them, by module and parameter name.

    Without sharding, reduced ones are among them. That does no harm: to average equal gradients again changes nothing.
    """
    handle = handle_of(unit)
    handle._reset_flat_param_grad_info_if_needed()
    flat = handle.flat_param
    if flat.grad is None or flat.grad.shape != flat._unpadded_unsharded_size:
        return {}
    views = handle._get_unflat_views(flat.grad)
    return {(info.module, info.param_name): view for info, view in zip(flat._param_infos, views, strict=True)}


def set_unreduced_gradients(unit: FSDP, gradients: Mapping[tuple[nn.Module, str], Callable[[], Tensor]]) -> None:
    """Restore gradients that :func:`unreduced_gradients` returned.

    Args:
        unit: The unit. The next reduction adds to the gradient set by :func:`set_reduced_gradient`.
        gradients: Functions that read a gradient, by module and parameter name. What is missing becomes zero, with
            which this rank takes part in the reduction of what other ranks have.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    flat._post_backward_called = True  # as after a backward pass that has reduced nothing
    values = {owner_and_name: read() for owner_and_name, read in gradients.items()}
    # without sharding, reduced gradients are among them, which have the dtype of the parameters
    dtype = handle._fwd_bwd_param_dtype if handle.uses_sharded_strategy else flat.dtype
    grad = torch.zeros(flat._unpadded_unsharded_size, dtype=dtype, device=handle.device)
    for info, view in zip(flat._param_infos, handle._get_unflat_views(grad), strict=True):
        value = values.get((info.module, info.param_name))
        if value is not None:
            view.copy_(value)
    if not handle.uses_sharded_strategy:
        if flat.grad is not None:
            grad += flat.grad
    elif flat.grad is not None:
        flat._saved_grad_shard = flat.grad.data
    data = flat.data
    flat.data = grad  # torch accepts a gradient of the size of the data only
    flat.grad = grad
    flat.data = data
    if handle._use_orig_params:
        handle._use_unsharded_grad_views()


def reduced_gradient(unit: FSDP) -> Tensor | None:
    """This rank's elements of a unit's reduced gradient, laid out as its shard.

    Returns:
        ``None`` if there is no gradient, or if this rank holds no element of the unit's trainable parameters.
    """
    handle = handle_of(unit)
    handle._reset_flat_param_grad_info_if_needed()
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:
        return None
    saved = saved_gradient(unit)
    if saved is not None:
        return saved
    if flat.grad is not None and flat.grad.shape == flat._sharded_size:
        return flat.grad  # type: ignore[no-any-return]
    return None


def saved_gradient(unit: FSDP) -> Tensor | None:
    """A unit's reduced gradient, which FSDP1 has set aside while an unreduced one accumulates."""
    saved: Tensor | None = getattr(handle_of(unit).flat_param, "_saved_grad_shard", None)
    return saved


def set_reduced_gradient(unit: FSDP, grad: Tensor) -> None:
    """Restore a gradient that :func:`reduced_gradient` returned."""
    handle = handle_of(unit)
    flat = handle.flat_param
    if hasattr(flat, "_cpu_grad"):  # with offload, FSDP1 shows this one
        grad = flat._cpu_grad.copy_(grad)
    flat.grad = grad
    if not handle._use_orig_params:
        return
    if handle.uses_sharded_strategy:
        flat._is_grad_none_mask = [False] * len(flat._params)  # FSDP1 shows no gradient where it is true
        handle._use_sharded_grad_views()
    else:
        handle._use_unsharded_grad_views()


def zero_gradient(unit: FSDP) -> Tensor:
    """A gradient of zeros, laid out as a unit's shard."""
    return torch.zeros_like(handle_of(unit).flat_param._local_shard)


def drop_gradients(unit: FSDP) -> None:
    """Drop every gradient of a unit."""
    flat = handle_of(unit).flat_param
    flat.grad = None
    flat._post_backward_called = False  # nothing waits for its reduction
    if hasattr(flat, "_saved_grad_shard"):
        del flat._saved_grad_shard
    for parameter in flat._params or ():
        parameter.grad = None
