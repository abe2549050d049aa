"""Casts the arguments of modules that a step method calls, where a dtype was chosen for the arguments of the root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.torch_private.autograd import in_backward
from fsdp_core.torch_private.dynamo import outside_of_compilation
from fsdp_core.torch_private.modules import cast_inputs

__all__ = ["StepInputs"]


class StepInputs:
    """Casts the arguments of modules that a step method calls by itself, as a root casts its own.

    Without it, ``self.net(batch)`` in a step fails where ``self(batch)`` is right: a step method runs in a call of the
    root without arguments, since a batch must not be cast. A target of 100001 is 99840 in bf16.

    Args:
        module: The user's module, whose step methods run where its ``forward`` would.
        called: Modules that a step may call.
        dtype: What floating-point tensors are cast to.
    """

    def __init__(self, module: nn.Module, called: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._depth = 0  # how many calls of these modules run; the arguments of the outermost alone are cast
        module.register_forward_pre_hook(self._enter_users_call, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave_users_call, with_kwargs=True, always_call=True)
        for called_module in called:
            called_module.register_forward_pre_hook(self._enter_call, with_kwargs=True, prepend=True)
            called_module.register_forward_hook(self._leave_call, always_call=True)

    @outside_of_compilation
    def _enter_call(self, called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if in_backward():  # a recomputation gets what the first computation got
            return None
        self._depth += 1
        if self._depth > 1 or called in gathered_modules:
            return None
        return cast_inputs(self._dtype, args, kwargs)

    @outside_of_compilation
    def _leave_call(self, called: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self._depth -= 1

    # A call of the user's module without arguments runs a step method, and is not counted as a call.

    @outside_of_compilation
    def _enter_users_call(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._enter_call(module, args, kwargs) if args or kwargs else None

    @outside_of_compilation
    def _leave_users_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if args or kwargs:
            self._leave_call(module, args, output)
