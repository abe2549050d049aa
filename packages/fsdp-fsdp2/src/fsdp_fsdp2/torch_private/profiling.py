"""``fully_shard``'s own code, without the time that it takes to name its work for profilers that don't run."""

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
    """Let torch's code of ``fully_shard`` run for a unit without two costs that are as high as that of a small kernel.

    Around a dozen times per unit and step it names its work for profilers, by an operator that takes ten microseconds
    whether a profiler runs or not. Here names are given only while one runs. And its hooks tell ``torch.compile`` at
    each call not to compile them, which takes nearly as long. Here they do so only while something is being compiled.

    Args:
        unit: The unit.
    """
    if not getattr(torch._dynamo.config, "skip_fsdp_hooks", True):  # the user wants them to be compiled
        return
    state: Any = unit._get_fsdp_state()
    for state_or_group in (state, *param_groups_of(unit)):
        original_class: Any = type(state_or_group)
        state_or_group.__class__ = _make_faster_class(original_class)
    module = cast("nn.Module", unit)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state:
                hooks[key] = getattr(state, hook.__name__)


def _name_for_profilers(name: str) -> Any:
    """Replaces ``record_function``: without a profiler, the context does next to nothing."""
    return (record_function if torch._C._autograd._profiler_enabled() else _RecordFunctionFast)(name)


class _TorchWithFastNames:
    """Stands for ``torch`` in functions that call ``torch.profiler.record_function``."""

    profiler = SimpleNamespace(record_function=_name_for_profilers)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


#: What functions get in place of a global, and the prefix of the name under which they find it.
_REPLACEMENTS = {"record_function": _name_for_profilers, "torch": _TorchWithFastNames()}
_PREFIX = "_fsdp_fsdp2_"

#: The attribute of classes that :func:`_make_faster_class` has made.
_IS_FASTER = "_fsdp_fsdp2_is_faster"


@functools.cache
def _make_faster_class(original_class: Any) -> Any:
    """A subclass of one of torch's, in which the methods that have one of the two costs are replaced."""
    if _IS_FASTER in vars(original_class):
        return original_class
    faster: dict[str, Any] = {_IS_FASTER: True, "__module__": original_class.__module__}
    for name in dir(original_class):
        method = inspect.getattr_static(original_class, name)
        function = method.__func__ if isinstance(method, staticmethod) else method
        if isinstance(function, FunctionType) and (faster_function := _make_faster(function)) is not function:
            faster[name] = staticmethod(faster_function) if isinstance(method, staticmethod) else faster_function
    return type(original_class.__name__, (original_class,), faster)


def _make_faster(function: FunctionType) -> FunctionType:
    """A function with the code of one of torch's, without its two costs; the function itself if it has neither."""
    inner = getattr(function, "__wrapped__", None)
    cells, code = function.__closure__ or (), function.__code__
    if isinstance(inner, FunctionType):
        faster = _make_faster(inner)
        if {"_dynamo", "disable"} <= set(code.co_names):
            return cast("FunctionType", outside_of_compilation(faster))
        if faster is inner:
            return function
        cells = tuple(CellType(faster) if cell.cell_contents is inner else cell for cell in cells)
    elif "record_function" not in code.co_names:
        return function
    else:
        # the replacement is added to the function's own globals, not to a copy: others may replace functions there
        replaced_name = "torch" if "profiler" in code.co_names else "record_function"
        function.__globals__.setdefault(_PREFIX + replaced_name, _REPLACEMENTS[replaced_name])
        code = code.replace(co_names=tuple(_PREFIX + name if name == replaced_name else name for name in code.co_names))
    rebuilt = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells or None)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return cast("FunctionType", functools.update_wrapper(rebuilt, function))
