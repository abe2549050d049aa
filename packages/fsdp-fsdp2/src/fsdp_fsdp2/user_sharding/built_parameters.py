"""The parameters that modules were built with on the meta device, from which shards that a user makes get their values.

``fully_shard`` and ``parallelize_module`` replace a module's parameters by shards, which don't say how the full
parameter is initialised. So full parameters are noted where torch registers them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["follow_building", "has_noted", "is_dtensor", "note_built", "noted_parameter"]


def is_dtensor(tensor: object) -> bool:
    """Whether a parameter is a DTensor. A function, because mypy takes ``isinstance(parameter, DTensor)`` for false."""
    return isinstance(tensor, DTensor)


_built: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()
_registration_hooks: list[object] = []


def follow_building() -> None:
    """Note all parameters on the meta device that are registered from now on, in any module. Idempotent.

    It goes on after the model is built: what is tied or replaced afterwards must be noted as well. The notes of a
    module end with it.
    """
    if not _registration_hooks:
        _registration_hooks.append(register_module_parameter_registration_hook(_note_parameter))
        _registration_hooks.append(register_module_module_registration_hook(_note_module))


def note_built(root: nn.Module) -> None:
    """Note the parameters on the meta device that a model has now, before the user's function shards it."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            _note_parameter(module, name, parameter)


def noted_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter that a module was built with under a name; ``None`` if none was noted."""
    return _built.get(module, {}).get(name)


def has_noted(root: nn.Module) -> bool:
    """Whether anything was noted of a model."""
    return any(module in _built for module in root.modules())


def _note_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if is_dtensor(parameter):
        return  # the user shards the parameter that was noted, which stays
    if parameter is not None and parameter.is_meta:
        _built.setdefault(module, {})[name] = parameter
    elif module in _built:
        _built[module].pop(name, None)


def _note_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Note the parameters of a module that is registered: copies have some that were never registered."""
    for module in () if child is None else child.modules():
        if module not in _built:
            for attribute, parameter in module._parameters.items():
                _note_parameter(module, attribute, parameter)
