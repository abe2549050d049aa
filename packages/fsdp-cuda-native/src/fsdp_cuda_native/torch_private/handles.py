"""What FSDP1's handles of flat parameters do for each parameter several times a step, in less time.

With many small parameters that takes as long as everything else that a unit's call needs:

- FSDP1 sets views in modules while a unit is gathered, and parameters when it is freed, through ``delattr()`` and
  ``setattr()``, which look for the name in several dictionaries and check the value. torch's own way around it,
  ``FSDP_USE_UNSAFE_SETATTR=1``, also bypasses modules that override these methods, and leaves a second reference to the
  parameter.
- Before it gathers, FSDP1 looks whether a parameter or a gradient was replaced by one with other memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParamHandle, _safe_setattr_tensor_or_param
from torch.nn.modules.module import _global_parameter_registration_hooks

__all__ = ["speed_up"]

_SETATTR, _DELATTR, _REGISTER = nn.Module.__setattr__, nn.Module.__delattr__, nn.Module.register_parameter


def speed_up(handle: Any) -> None:
    """Let a handle do this in less time, and otherwise what torch's does.

    Args:
        handle: The handle of a flat parameter. One that was told to use torch's unsafe way goes on with that.
    """
    handle.__class__ = _Handle
    if handle._setattr_tensor is _safe_setattr_tensor_or_param:
        handle._setattr_tensor = _set_tensor
    if handle._setattr_param is _safe_setattr_tensor_or_param:
        handle._setattr_param = _set_parameter


class _Handle(FlatParamHandle):
    def _writeback_orig_params(self) -> bool:
        return False if self._is_in_place() else super()._writeback_orig_params()

    def _is_in_place(self) -> bool:
        """Whether parameters and gradients certainly are where FSDP1 has put them.

        Whatever is unusual is left to FSDP1, and what it makes of it.
        """
        if (
            self._skipped_use_sharded_views
            or self._fsdp_extension is not None  # parameters may be DTensors
            or (self._offload_params and not self.uses_sharded_strategy)  # gradients are in two places
        ):
            return False
        flat: Any = self.flat_param
        start, size, gradient = flat.data_ptr(), flat.element_size(), flat.grad
        if gradient is not None:
            gradient_start, gradient_size = gradient.data_ptr(), gradient.element_size()
        for parameter, (in_shard, offset, *_), (name, module, _) in zip(
            flat._params, flat._shard_param_infos, flat._param_infos, strict=True
        ):
            if not in_shard:
                continue
            if module._parameters.get(name) is not parameter or parameter.data_ptr() != start + offset * size:
                return False
            held = parameter.grad
            if gradient is None or held is None:
                if gradient is not held:
                    return False
            elif held.data_ptr() != gradient_start + offset * gradient_size:
                return False
        return True


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
