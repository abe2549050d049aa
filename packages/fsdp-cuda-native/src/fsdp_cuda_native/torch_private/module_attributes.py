"""What FSDP1 sets in modules: views while a unit is gathered, and parameters again when it is freed.

FSDP1 sets each of them through ``delattr()`` and ``setattr()``, which for a module look for the name in several
dictionaries and check the value: with many small parameters that takes as long as the rest of gathering and freeing.
torch's own way around it, ``FSDP_USE_UNSAFE_SETATTR=1``, bypasses modules that override these methods, and leaves a
second reference to the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import _safe_setattr_tensor_or_param
from torch.nn.modules.module import _global_parameter_registration_hooks

__all__ = ["set_directly"]

_SETATTR, _DELATTR, _REGISTER = nn.Module.__setattr__, nn.Module.__delattr__, nn.Module.register_parameter


def set_directly(handle: Any) -> None:
    """Let the handle of a flat parameter set the attributes of modules without ``setattr()``, where nothing observes it.

    Args:
        handle: The handle. One that was told to use torch's unsafe way goes on with that.
    """
    if handle._setattr_tensor is _safe_setattr_tensor_or_param:
        handle._setattr_tensor = _set_tensor
    if handle._setattr_param is _safe_setattr_tensor_or_param:
        handle._setattr_param = _set_parameter


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    attributes = module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    if not _is_plain(type(module)) or (name not in parameters and name not in attributes):
        _safe_setattr_tensor_or_param(module, name, tensor)
        return
    parameters.pop(name, None)
    object.__setattr__(module, name, tensor)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    attributes = module.__dict__
    parameters: dict[str, Any] = attributes["_parameters"]
    if (
        not _is_plain(type(module))
        or type(module).register_parameter is not _REGISTER
        or _global_parameter_registration_hooks
        or (name not in parameters and name not in attributes)
    ):
        _safe_setattr_tensor_or_param(module, name, parameter)
        return
    attributes.pop(name, None)
    parameters.pop(name, None)  # torch too puts it behind the module's others
    parameters[name] = parameter


def _is_plain(cls: type[nn.Module]) -> bool:
    """Whether modules of a class set and delete attributes as any module does."""
    return cls.__setattr__ is _SETATTR and cls.__delattr__ is _DELATTR
