"""Lets a script build a large module in little memory: weights get an address range of their size, and are not filled.

The host gives memory to a page when something is written to it. A rehearsal needs no values of weights, so what their
initialization would write is left out: a module of 30 GB is built in seconds. Small tensors, integers and masks are
what the script makes them: code of constructors asks for their values.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.torch_private.fake_tensors import operator_name
from fsdp_core.torch_private.tensors import TorchDispatchMode

__all__ = ["UnfilledWeights"]

#: Tensors with fewer bytes are filled.
_MIN_NBYTES = 1 << 20

#: Operators that write random numbers to a tensor, set or copy it, or compute with what was written.
_IN_PLACE = frozenset(
    {
        *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"),
        *("zero_", "fill_", "copy_", "mul_", "add_", "sub_", "div_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_"),
    }
)

#: Operators that return a tensor of a size that they are given.
_OF_A_SIZE = frozenset({"empty", "randn", "rand", "zeros", "ones", "full"})

#: Operators that return a tensor like their first.
_LIKE_FIRST = frozenset(
    {
        "clone",
        "_to_copy",
        "empty_like",
        "randn_like",
        "rand_like",
        "zeros_like",
        "ones_like",
        "mul",
        "add",
        "sub",
        "div",
    }
)

#: Methods of modules that build, initialize or convert weights.
_BUILDING = frozenset({"__init__", "reset_parameters", "apply", "_apply"})


class UnfilledWeights(TorchDispatchMode):
    """Does not fill large weights while a module is built."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_on = True

    @contextmanager
    def filled(self) -> Iterator[None]:
        """A context in which it does nothing."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_on and func.namespace == "aten" and args:
            operator = operator_name(func)
            if operator in _IN_PLACE and _is_large(args[0]) and _is_building():
                return args[0]
            shape_and_dtype = _large_result(operator, args, kwargs)
            if shape_and_dtype is not None and _is_building():
                return _unfilled(*shape_and_dtype)
        return func(*args, **kwargs)


def _large_result(operator: str, args: Any, kwargs: Any) -> tuple[Any, torch.dtype] | None:
    """The shape and dtype of what an operator returns, if that is a large weight."""
    device, memory_format = kwargs.get("device"), kwargs.get("memory_format")
    if (device or _CPU).type != "cpu" or memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return None
    first, dtype = args[0], kwargs.get("dtype")
    if operator in _LIKE_FIRST and _is_large(first) and first.is_contiguous():
        is_scaled = all(not isinstance(x, Tensor) or (x.dim() == 0 and not x.is_complex()) for x in args[1:2])
        shape, dtype = first.shape, (dtype or first.dtype) if is_scaled else None
    elif operator in _OF_A_SIZE and isinstance(first, (list, tuple)):
        is_integer = operator == "full" and not isinstance(args[1], float)
        shape, dtype = first, dtype or (None if is_integer else torch.get_default_dtype())
    else:
        return None
    is_weight = dtype is not None and dtype.is_floating_point
    return (shape, dtype) if is_weight and math.prod(shape) * dtype.itemsize >= _MIN_NBYTES else None


def _is_large(tensor: Any) -> bool:
    is_weight = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.device.type == "cpu"
    return is_weight and tensor.nbytes >= _MIN_NBYTES


def _unfilled(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor whose pages nobody has written to."""
    if sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    # the host reserves nothing for these pages, or it would not fork a process that has more than it can give
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


#: Python has no name for it before 3.13.
_MAP_NORESERVE = 0x4000

_CPU = torch.device("cpu")


def _is_building() -> bool:
    """Whether a module's constructor, or the like, is on the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _BUILDING and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False
