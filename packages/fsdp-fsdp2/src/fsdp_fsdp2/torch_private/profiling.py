"""Hooks of units without the cost of names for a profiler that does not run."""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch.utils
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fsdp_core.sharding import outside_of_compilation
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of

__all__ = ["speed_up"]


def speed_up(unit: FSDPModule) -> None:
    """Let ``fully_shard`` do for a unit what it does, in less time: by torch's own code, without two detours.

    Around a dozen times per unit and step it names for profilers what it does, by an operator that takes ten
    microseconds whether one runs or not, which is as long as a small kernel; without a profiler, names are left out
    here. And hooks tell ``torch.compile`` at each call to leave them out, which takes nearly as long; here they do so
    where something is being compiled.

    Args:
        unit: The unit.
    """
    if not getattr(torch._dynamo.config, "skip_fsdp_hooks", True):  # the user wants them to be compiled
        return
    state: Any = unit._get_fsdp_state()
    for each in (state, *param_groups_of(unit)):
        original_class: Any = type(each)
        each.__class__ = _faster_class(original_class)
    module = cast("nn.Module", unit)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state:
                hooks[key] = getattr(state, hook.__name__)


def _name_for_profilers(name: str) -> Any:
    """What ``record_function`` is while a profiler runs, and otherwise a context that does next to nothing."""
    return (record_function if torch._C._autograd._profiler_enabled() else _RecordFunctionFast)(name)


class _Torch:
    """torch, to functions that look for ``record_function`` in there."""

    profiler = SimpleNamespace(record_function=_name_for_profilers)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_NAMING = {"record_function": _name_for_profilers, "torch": _Torch()}

_NAMED = "_fsdp_fsdp2_"


@functools.cache
def _faster_class(original_class: Any) -> Any:
    """A class with the methods of one of torch's, in which those that are slow without need are faster."""
    if _IS_FASTER in vars(original_class):
        return original_class
    faster: dict[str, Any] = {_IS_FASTER: True, "__module__": original_class.__module__}
    for name in dir(original_class):
        method = inspect.getattr_static(original_class, name)
        function = method.__func__ if isinstance(method, staticmethod) else method
        if isinstance(function, FunctionType) and (faster_function := _faster(function)) is not function:
            faster[name] = staticmethod(faster_function) if isinstance(method, staticmethod) else faster_function
    return type(original_class.__name__, (original_class,), faster)


_IS_FASTER = "_fsdp_fsdp2_is_faster"


def _faster(function: FunctionType) -> FunctionType:
    """A function of torch's by the same code, for which names cost nothing, and being left out of compilation neither.

    Returns:
        The function itself if it does neither.
    """
    inner = getattr(function, "__wrapped__", None)
    cells, code = function.__closure__ or (), function.__code__
    if isinstance(inner, FunctionType):
        faster = _faster(inner)
        if {"_dynamo", "disable"} <= set(code.co_names):
            return cast("FunctionType", outside_of_compilation(faster))
        if faster is inner:
            return function
        cells = tuple(CellType(faster) if cell.cell_contents is inner else cell for cell in cells)
    elif "record_function" not in code.co_names:
        return function
    else:
        # in the same module, whose functions others may replace, by names of our own
        replaced_name = "torch" if "profiler" in code.co_names else "record_function"
        function.__globals__.setdefault(_NAMED + replaced_name, _NAMING[replaced_name])
        code = code.replace(co_names=tuple(_NAMED + name if name == replaced_name else name for name in code.co_names))
    rebuilt = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells or None)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return cast("FunctionType", functools.update_wrapper(rebuilt, function))
