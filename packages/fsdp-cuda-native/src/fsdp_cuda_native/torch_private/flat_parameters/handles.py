"""What FSDP1's handles of flat parameters do for each parameter several times a step, in less time.

With many small parameters that takes as long as everything else that a unit's call needs:

- ``_use_unsharded_views`` sets views in modules when a unit is gathered, and ``_use_sharded_views`` sets parameters
  when it is freed, through ``delattr()`` and ``setattr()``, which look for the name in several dictionaries and check
  the value. torch's own way around them, ``FSDP_USE_UNSAFE_SETATTR=1``, also bypasses modules that override these
  methods, and leaves a second reference to the parameter.
- ``_writeback_orig_params`` looks, before each gather, whether a parameter or a gradient was replaced by one with other
  memory.
- ``_use_sharded_views`` makes views of the shard and lets parameters be these; and ``_use_unsharded_views``, in a
  backward pass, makes views of the gathered parameter to replace those of the forward pass. The old and the new views
  almost always have the same memory.

Here these methods first look whether all is as usual, in a few operations on all parameters together, and leave to
torch's whatever is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import _safe_setattr_tensor_or_param
from torch.nn.modules.module import _global_parameter_registration_hooks

from fsdp_core.sharding import guard_parameters, outside_of_compilation, unguard_parameters, without_torch_function
from fsdp_cuda_native.torch_private.flat_parameters.streams import HandleWithStreams
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = ["use_own_methods"]

#: torch's own ways to set what a module holds: modules that override one are left to torch.
_SETATTR, _DELATTR, _REGISTER = nn.Module.__setattr__, nn.Module.__delattr__, nn.Module.register_parameter

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


def use_own_methods(unit: FSDP) -> None:
    """Make a unit's handle use the methods of this module and of ``streams``, and torch's for everything else.

    Args:
        unit: The unit. A handle that was told to use torch's unsafe way goes on with that.
    """
    handle = handle_of(unit)
    handle.__class__ = _Handle if handle._use_orig_params else _HandleOfFlat
    if handle._setattr_tensor is _safe_setattr_tensor_or_param:
        handle._setattr_tensor = _set_tensor
    if handle._setattr_param is _safe_setattr_tensor_or_param:
        handle._setattr_param = _set_parameter
    handle.order_gathers(unit)


class _Handle(HandleWithStreams):
    """The handle of a flat parameter whose original parameters optimizers hold.

    Its methods are ``outside_of_compilation``, since torch.compile leaves out the file of torch's handles, and not this
    one. They look at parameters ``without_torch_function``: where core guards these, each look at an attribute would go
    through Python.

    Attributes:
        guarded: The parameters that ``summon_full_params()`` has found guarded, until it ends.
        user_names: The user's names of the parameters.
    """

    guarded: Sequence[Tensor] = ()
    user_names: Sequence[str] = ()

    @outside_of_compilation
    def _writeback_orig_params(self) -> bool:
        with without_torch_function():
            return False if self._is_in_place() else super()._writeback_orig_params()

    @outside_of_compilation
    def _reset_flat_param_grad_info_if_needed(self) -> None:
        if self._training_state == HandleTrainingState.BACKWARD_PRE:
            return  # the root is called again, by a recomputation: a part of the gradient is there already
        with without_torch_function():
            super()._reset_flat_param_grad_info_if_needed()  # type: ignore[no-untyped-call]

    def _deregister_orig_params(self) -> None:
        # Called by module.to() and the like, after which torch registers parameters again, as views of the flat one.
        # It would also show gradients that were cleared since the step: they are dropped first.
        self._reset_flat_param_grad_info_if_needed()
        flat: Any = self.flat_param
        first = flat._param_infos[0]
        is_freed = self.uses_sharded_strategy and first.module._parameters.get(first.param_name) is flat._params[0]
        is_unreduced = flat.grad is not None and flat.grad.shape == flat._unpadded_unsharded_size
        if is_freed and not is_unreduced:  # torch compares gradients with the shard, which unreduced ones do not fit
            self._writeback_orig_params()  # what was assigned to ``parameter.data`` would not be in the new views
        super()._deregister_orig_params()  # type: ignore[no-untyped-call]

    def _is_in_place(self) -> bool:
        """Whether parameters and gradients certainly are where FSDP1 has put them, so that nothing is to write back.

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
        # the parameters of which this rank holds elements, and where these begin in its shard
        offsets = [info.offset_in_shard for info in flat._shard_param_infos if info.in_shard]
        params = flat._params
        if len(offsets) != len(params):
            params = [p for p, info in zip(params, flat._shard_param_infos, strict=True) if info.in_shard]
        if not _are_parts(params, flat, offsets):
            return False
        gradients = [gradient for p in params if (gradient := p.grad) is not None]
        if flat.grad is not None:  # then a parameter without a gradient is unusual: its part of ``flat.grad`` is stale
            return _are_parts(gradients, flat.grad, offsets)
        if not gradients:
            return True
        # within a backward pass, what it has reduced is not FSDP1's ``grad`` yet
        reduced = getattr(flat, "_cpu_grad", getattr(flat, "_saved_grad_shard", None))
        grad_offsets = [offset for p, offset in zip(params, offsets, strict=True) if p.grad is not None]
        return reduced is not None and _are_parts(gradients, reduced, grad_offsets)

    @outside_of_compilation
    def _use_sharded_views(self) -> None:
        flat: Any = self.flat_param
        if self.guarded:  # summon_full_params() has ended
            guard_parameters(self.guarded)
            self.guarded = ()
        with without_torch_function():
            if self._skipped_use_sharded_views or not self._are_plain() or not self._are_views_of_shard():
                super()._use_sharded_views()
                return
        for parameter, (name, module, _) in zip(flat._params, flat._param_infos, strict=True):
            self._setattr_param(module, name, parameter)
        if self.uses_sharded_strategy and self._training_state == HandleTrainingState.BACKWARD_POST:
            flat._tensors[:] = [None] * len(flat._tensors)  # as torch does: the forward pass's views are needed no more

    def _are_plain(self) -> bool:
        """Whether parameters are no DTensors, keep their identity, and none is tied to another."""
        return self._use_orig_params and self._fsdp_extension is None and not self.flat_param._shared_param_infos

    def _are_views_of_shard(self) -> bool:
        """Whether parameters are already the views of the shard, or without sharding of all, that FSDP1 would make."""
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
            or self._training_state != HandleTrainingState.BACKWARD_PRE  # only a backward pass takes the old views
            or not self._are_plain()
            or any(tensor is None for tensor in tensors)
            or any(tensor.dtype != flat.dtype for tensor in tensors)
            or not _are_parts(tensors, flat, self.offsets())
        ):
            with without_torch_function():
                super()._use_unsharded_views(as_params)
            if as_params:  # summon_full_params(): parameters are no pieces until it ends
                self.guarded = unguard_parameters(flat._params or ())
            return
        for tensor, (name, module, _) in zip(tensors, flat._param_infos, strict=True):
            self._setattr_tensor(module, name, tensor)

    def offsets(self) -> list[int]:
        """Where each parameter begins in the gathered flat parameter, in elements."""
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


def _are_parts(tensors: list[Tensor], flat: Tensor, offsets: list[int]) -> bool:
    """Whether tensors begin at these offsets in the memory of a flat one; the offsets are in elements."""
    start, size = flat.data_ptr(), flat.element_size()
    return list(map(Tensor.data_ptr, tensors)) == [start + offset * size for offset in offsets]


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a module hold a view of the gathered flat parameter, as an attribute that is no parameter."""
    cls, attributes = type(module), module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    if cls.__setattr__ is _SETATTR and cls.__delattr__ is _DELATTR and (name in parameters or name in attributes):
        parameters.pop(name, None)
        object.__setattr__(module, name, tensor)
    else:
        _safe_setattr_tensor_or_param(module, name, tensor)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let a module hold a parameter again."""
    cls, attributes = type(module), module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    if (
        cls.__setattr__ is _SETATTR
        and cls.__delattr__ is _DELATTR
        and cls.register_parameter is _REGISTER
        and not _global_parameter_registration_hooks
        and (name in parameters or name in attributes)
    ):
        attributes.pop(name, None)
        parameters.pop(name, None)  # torch too puts it behind the module's others
        parameters[name] = parameter
    else:
        _safe_setattr_tensor_or_param(module, name, parameter)
