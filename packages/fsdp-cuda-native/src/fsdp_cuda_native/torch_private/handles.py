"""What FSDP1's handles of flat parameters do for each parameter several times a step, in less time.

With many small parameters that takes as long as everything else that a unit's call needs:

- FSDP1 sets views in modules while a unit is gathered, and parameters when it is freed, through ``delattr()`` and
  ``setattr()``, which look for the name in several dictionaries and check the value. torch's own way around it,
  ``FSDP_USE_UNSAFE_SETATTR=1``, also bypasses modules that override these methods, and leaves a second reference to the
  parameter.
- Before it gathers, FSDP1 looks whether a parameter or a gradient was replaced by one with other memory.
- When it frees a unit, it makes views of the shard and lets parameters be these; and when it gathers a unit for a
  backward pass, it makes views of the gathered parameter to replace those of the forward pass. The old and the new
  views almost always have the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle, _safe_setattr_tensor_or_param
from torch.nn.modules.module import _global_parameter_registration_hooks

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import (
    count_piece_writes,
    guard_parameters,
    outside_of_compilation,
    unguard_parameters,
    without_torch_function,
)

__all__ = ["order_gathers", "speed_up"]

_SETATTR, _DELATTR, _REGISTER = nn.Module.__setattr__, nn.Module.__delattr__, nn.Module.register_parameter


def speed_up(handle: Any) -> None:
    """Make a handle use the faster methods of this module, and torch's for everything else.

    Args:
        handle: The handle of a flat parameter. One that was told to use torch's unsafe way goes on with that.
    """
    handle.__class__ = _Handle if handle._use_orig_params else _HandleOfFlat
    if handle._setattr_tensor is _safe_setattr_tensor_or_param:
        handle._setattr_tensor = _set_tensor
    if handle._setattr_param is _safe_setattr_tensor_or_param:
        handle._setattr_param = _set_parameter


_UNIT, _COPIED = "_fsdp_cuda_native_unit", "_fsdp_cuda_native_copied"

#: The :func:`count_piece_writes` that the streams of FSDP1's gathers have waited for; a list, so that it can be set.
_ordered_writes = [0]


def order_gathers(handle: Any, unit: nn.Module) -> None:
    """Let FSDP1's streams on an accelerator wait for what a step has written to pieces and to their gradients.

    FSDP1's streams wait for the current one when the root's forward pass begins, and not again: they would
    read too early what a step writes after that. The CPU has no streams.

    Args:
        handle: The handle of the unit's flat parameter.
        unit: The unit.
    """
    if handle.device.type != "cpu":
        vars(handle)[_UNIT] = weakref.ref(unit)
        if handle._offload_params:
            vars(unit)["_apply"] = MethodType(_convert, unit)
            unit.register_forward_hook(partial(_wait_for_copies, weakref.ref(handle)))


def _convert(unit: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert a unit whose shards are in host memory, as ``module.to()`` does, and refuse to move these."""
    if fn(torch.empty(0)).device.type != "cpu":
        raise UnsupportedCapabilityError(
            "a module whose shards cpu_offload keeps in host memory can't be moved to an accelerator, as by "
            "module.to(): its units are gathered there while they are used.\n"
            "Leave the conversion out, or cpu_offload. Inputs go to self.device, or fabric.device."
        )
    return type(unit)._apply(unit, fn, recurse)


@outside_of_compilation
def _wait_for_copies(handle_ref: weakref.ref[Any], *_: Any) -> None:
    """Let the host wait until a shard in its memory is copied: else the copy could hold what it writes next."""
    copied = vars(handle_ref()).pop(_COPIED, None)
    if copied is not None:
        copied.synchronize()


def _unit_with_streams(handle: Any) -> Any:
    """The unit of a handle on an accelerator, once its root has been called; else ``None``."""
    unit_ref = vars(handle).get(_UNIT)
    unit = None if unit_ref is None else unit_ref()
    return unit if hasattr(unit, "_default_stream") else None


def _wait_for_writes(handle: Any) -> None:
    unit = _unit_with_streams(handle)
    writes = count_piece_writes()
    if unit is None or writes == _ordered_writes[0]:
        return
    _ordered_writes[0] = writes
    for stream in (unit._pre_unshard_stream, unit._unshard_stream):
        stream.wait_stream(unit._default_stream)


class _Handle(FlatParamHandle):
    # torch.compile leaves out the file of torch's handles, and not this one

    # parameters may be guarded, see fsdp_core's step_gradients: their attributes would go through Python

    @outside_of_compilation
    def pre_unshard(self) -> bool:
        if _UNIT not in self.__dict__:
            return bool(super().pre_unshard())
        _wait_for_writes(self)
        has_queued = bool(super().pre_unshard())
        if self._offload_params:
            unit, flat = _unit_with_streams(self), self.flat_param
            self.__dict__[_COPIED] = self._device_handle.current_stream().record_event()
            if not self.uses_sharded_strategy and unit is not None and flat.device == self.device:
                # FSDP1 has copied it to the device on this stream, and frees it while the default one still computes
                flat.data.record_stream(unit._default_stream)
        return has_queued

    @outside_of_compilation
    def _writeback_orig_params(self) -> bool:
        with without_torch_function():
            if self._is_in_place():
                return False
            unit = _unit_with_streams(self)
            if unit is None:
                return bool(super()._writeback_orig_params())
            # FSDP1 copies on the stream of its gathers what other streams write and read
            current, others = unit._device_handle.current_stream(), (unit._default_stream, unit._post_backward_stream)
            for stream in others:
                current.wait_stream(stream)
            has_written = bool(super()._writeback_orig_params())
            for stream in others:
                stream.wait_stream(current)
                if self.flat_param.grad is not None and self.flat_param.grad.device == self.device:
                    self.flat_param.grad.record_stream(stream)
            return has_written

    @outside_of_compilation
    def prepare_gradient_for_backward(self) -> None:
        flat: Any = self.flat_param
        grad = flat.grad
        if grad is None or grad.device == self.device or grad.shape != flat._local_shard.shape:
            super().prepare_gradient_for_backward()  # type: ignore[no-untyped-call]
            return
        # the reduced gradient of an earlier pass, in host memory: FSDP1 would replace it by that of this pass
        if self.uses_sharded_strategy:
            flat.grad = None
            if not hasattr(flat, "_saved_grad_shard"):
                flat._saved_grad_shard = grad.to(self.device, flat._local_shard.dtype, non_blocking=True)
        else:
            super().prepare_gradient_for_backward()  # type: ignore[no-untyped-call]
            flat.grad = grad.to(self.device, non_blocking=True)  # to which this pass adds in place

    @outside_of_compilation
    def _reset_flat_param_grad_info_if_needed(self) -> None:
        if self._training_state == HandleTrainingState.BACKWARD_PRE:
            return  # the root is called again, by a recomputation: a part of the gradient is there already
        with without_torch_function():
            super()._reset_flat_param_grad_info_if_needed()  # type: ignore[no-untyped-call]

    def _deregister_orig_params(self) -> None:
        # Called by module.to() and the like. Registering parameters again, torch would also show gradients that were
        # cleared since the step: they are dropped first.
        self._reset_flat_param_grad_info_if_needed()
        flat: Any = self.flat_param
        name, module, _ = flat._param_infos[0]
        is_reduced = flat.grad is None or flat.grad.shape != flat._unpadded_unsharded_size
        if self.uses_sharded_strategy and is_reduced and module._parameters.get(name) is flat._params[0]:
            self._writeback_orig_params()
        super()._deregister_orig_params()  # type: ignore[no-untyped-call]

    def _is_in_place(self) -> bool:
        """Whether parameters and gradients certainly are where FSDP1 has put them.

        False for anything unusual: FSDP1 then compares each of them.
        """
        if (
            self._skipped_use_sharded_views
            or self._fsdp_extension is not None  # parameters may be DTensors
            or (self._offload_params and not self.uses_sharded_strategy)  # gradients are in two places
        ):
            return False
        flat: Any = self.flat_param
        for parameter, (name, module, _) in zip(flat._params, flat._param_infos, strict=True):
            if module._parameters.get(name) is not parameter:
                return False
        offsets = [info.offset_in_shard for info in flat._shard_param_infos if info.in_shard]
        params = flat._params
        if len(offsets) != len(params):
            params = [p for p, info in zip(params, flat._shard_param_infos, strict=True) if info.in_shard]
        gradients = [gradient for p in params if (gradient := p.grad) is not None]
        if not _are_parts(params, flat, offsets):
            return False
        if flat.grad is not None:
            return _are_parts(gradients, flat.grad, offsets)
        # within a backward pass, what it has reduced is not FSDP1's ``grad`` yet
        reduced = getattr(flat, "_cpu_grad", getattr(flat, "_saved_grad_shard", None))
        if not gradients or reduced is None:
            return not gradients
        return _are_parts(gradients, reduced, [at for p, at in zip(params, offsets, strict=True) if p.grad is not None])

    @outside_of_compilation
    def _use_sharded_views(self) -> None:
        flat: Any = self.flat_param
        guard_parameters(self.__dict__.pop(_GUARDED, ()))
        with without_torch_function():
            if not self._are_plain() or self._skipped_use_sharded_views or not self._are_views_of_shard():
                super()._use_sharded_views()
                return
        for parameter, (name, module, _) in zip(flat._params, flat._param_infos, strict=True):
            self._setattr_param(module, name, parameter)
        if self.uses_sharded_strategy and self._training_state == HandleTrainingState.BACKWARD_POST:
            flat._tensors[:] = [None] * len(flat._tensors)

    def _are_plain(self) -> bool:
        """Whether parameters are no DTensors, keep their identity, and none is tied to another."""
        return self._use_orig_params and self._fsdp_extension is None and not self.flat_param._shared_param_infos

    def _are_views_of_shard(self) -> bool:
        """Whether parameters are those views already that FSDP1 would let them be."""
        flat: Any = self.flat_param
        infos, params = flat._shard_param_infos, flat._params
        if self.uses_sharded_strategy:
            shapes = [(info.numel_in_shard if info.in_shard else 0,) for info in infos]
            strides: list[tuple[int, ...]] = [(1,)] * len(shapes)
            sharded_params = [parameter for parameter, info in zip(params, infos, strict=True) if info.in_shard]
        else:
            shapes, strides, sharded_params = flat._shapes, flat._strides, params
        return (
            list(map(_DTYPE, params)) == [flat.dtype] * len(params)
            and list(map(_SHAPE, params)) == list(shapes)
            and list(map(Tensor.stride, params)) == list(strides)
            and _are_parts(sharded_params, flat, [info.offset_in_shard for info in infos if info.in_shard])
        )

    @outside_of_compilation
    def _use_unsharded_views(self, as_params: bool) -> None:
        flat: Any = self.flat_param
        tensors = flat._tensors
        if (
            as_params
            or self._training_state != HandleTrainingState.BACKWARD_PRE
            or not self._are_plain()
            or any(tensor is None for tensor in tensors)
            or any(tensor.dtype != flat.dtype for tensor in tensors)
            or not _are_parts(tensors, flat, self.offsets())
        ):
            with without_torch_function():
                super()._use_unsharded_views(as_params)
            if as_params:  # summon_full_params(): they are whole for a while
                self.__dict__[_GUARDED] = unguard_parameters(flat._params or ())
            return
        for tensor, (name, module, _) in zip(tensors, flat._param_infos, strict=True):
            self._setattr_tensor(module, name, tensor)

    def offsets(self) -> list[int]:
        """Where parameters begin in what is gathered."""
        flat: Any = self.flat_param
        ends = accumulate(flat._numels_with_padding)
        parts = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
        return [end - numel for end, numel, is_padding in parts if not is_padding]


class _HandleOfFlat(_Handle):
    """The handle of a flat parameter that modules and optimizers hold as it is, without original parameters."""

    @outside_of_compilation
    def pre_unshard(self) -> bool:
        # FSDP1 reads the flat parameter here, which may be guarded: outside of calls too, for summon_full_params()
        unguard_parameters([self.flat_param])
        return bool(super().pre_unshard())


_GUARDED = "_fsdp_cuda_native_guarded"
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


def _are_parts(tensors: list[Tensor], of: Tensor, offsets: list[int]) -> bool:
    """Whether tensors begin at offsets of a flat one, in elements."""
    start, size = of.data_ptr(), of.element_size()
    return list(map(Tensor.data_ptr, tensors)) == [start + offset * size for offset in offsets]


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    cls, attributes = type(module), module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    is_parameter = name in parameters
    if cls.__setattr__ is _SETATTR and cls.__delattr__ is _DELATTR and (is_parameter or name in attributes):
        if is_parameter:
            del parameters[name]
        object.__setattr__(module, name, tensor)
    else:
        _safe_setattr_tensor_or_param(module, name, tensor)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    cls, attributes = type(module), module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    if (
        cls.__setattr__ is not _SETATTR
        or cls.__delattr__ is not _DELATTR
        or cls.register_parameter is not _REGISTER
        or _global_parameter_registration_hooks
    ):
        _safe_setattr_tensor_or_param(module, name, parameter)
    elif name in parameters:
        attributes.pop(name, None)
        del parameters[name]  # torch too puts it behind the module's others
        parameters[name] = parameter
    elif name in attributes:
        del attributes[name]
        parameters[name] = parameter
    else:
        _safe_setattr_tensor_or_param(module, name, parameter)
