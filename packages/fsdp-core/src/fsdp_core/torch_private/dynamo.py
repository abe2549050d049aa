"""How ``torch.compile`` is told what to leave alone and what to take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

# Whether torch.compile looks at what this thread calls, and how it is told to leave a function alone.
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._functorch._aot_autograd import runtime_wrappers

__all__ = [
    "let_compiled_graphs_take",
    "outside_of_compilation",
]


P = ParamSpec("P")


R = TypeVar("R")


def outside_of_compilation(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` compile neither a function nor what it calls, as :func:`torch.compiler.disable` does.

    That sets the compiler's state four times in each call, which takes as long as a small kernel's launch. Here it
    does so where something is being compiled, and otherwise there is nothing to set.

    Args:
        function: The function, such as a hook of a unit's forward pass.

    Example:
        >>> @outside_of_compilation
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        6
    """
    disabled: Any = torch.compiler.disable(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        result: R = disabled(*args, **kwargs)
        return result

    skip_code(call.__code__)
    functools.update_wrapper(call, function)
    vars(call).update({name: value for name, value in vars(disabled).items() if name.startswith("_torchdynamo_")})
    vars(call)["_torchdynamo_wrapper_id"] = id(call)
    return call


def let_compiled_graphs_take(tensor_class: type[Tensor]) -> None:
    """Let the graphs of ``torch.compile`` take a class of tensors that compute as plain ones do.

    From torch 2.11 on, the first call of a graph checks what custom operators return, and fails for arguments whose
    class that check does not know ("Multiple dispatch failed"). There is no public way to name one.

    Args:
        tensor_class: The class.
    """
    handled_types = getattr(runtime_wrappers, "HANDLED_TYPES", None)
    if handled_types is not None and tensor_class not in handled_types:
        runtime_wrappers.HANDLED_TYPES = (*handled_types, tensor_class)  # type: ignore[attr-defined]
