"""Running a step method of the user's inside the forward pass of a root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn

__all__ = ["call_inside_forward", "is_inside_forward"]

_inside: WeakSet[nn.Module] = WeakSet()


def call_inside_forward(root: nn.Module, module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``module.method(*args, **kwargs)`` where ``root`` would call ``module.forward``.

    The arguments don't pass through the root's hooks. A sharding library casts what does to the dtype of computation,
    which a batch must be spared: a target of 100001 is 99840 in bf16.

    Args:
        root: The module to call, with no arguments.
        module: The module inside it (it may be the root itself) whose method to call.
        method: The name of the method.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What the method returned, as the root's hooks passed it on.

    Example:
        >>> class Model(nn.Module):
        ...     def training_step(self, batch):
        ...         return 2 * batch
        >>> model = Model()
        >>> call_inside_forward(model, model, "training_step", 21)
        42
    """
    forward: Callable[..., Any] = module.forward

    def step() -> Any:
        module.forward = forward  # the method may call it
        return getattr(module, method)(*args, **kwargs)

    module.forward = step
    _inside.update((root, module))
    try:
        return root()
    finally:
        _inside.difference_update((root, module))
        module.forward = forward


def is_inside_forward(module: nn.Module) -> bool:
    """Whether :func:`call_inside_forward` is under way for a root, or for the module that it stands for."""
    return module in _inside
