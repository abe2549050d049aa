"""``zero_grad()`` within an accumulation: gradients that are not reduced yet are discarded, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fsdp_core.gradients.step_gradients import forget_shown
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = ["on_zero_grad"]

_optimizer_callbacks: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()
_module_callbacks: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()


def on_zero_grad(owner: Optimizer | nn.Module, callback: Callable[[], None]) -> None:
    """Call a function at the end of each ``zero_grad()`` of an optimizer, or of a module or what is around it.

    torch has hooks for an optimizer's steps, and none for this. Lightning's wrappers of optimizers and modules look the
    method up at their class, and not at the object that they wrap; so torch's methods are replaced, once for the
    process, by functions that also call the callback of an object that has one.

    Args:
        owner: The user's optimizer, or a module.
        callback: What to call, instead of what was given before. It must not keep ``owner`` alive.
    """
    if isinstance(owner, Optimizer):
        _optimizer_callbacks[owner] = callback
    else:
        _module_callbacks[owner] = callback
    if Optimizer.zero_grad is not _optimizer_zero_grad:
        Optimizer.zero_grad = _optimizer_zero_grad  # type: ignore[method-assign]
        nn.Module.zero_grad = _module_zero_grad  # type: ignore[method-assign]


_torch_optimizer_zero_grad = Optimizer.zero_grad
_torch_module_zero_grad = nn.Module.zero_grad


@wraps(_torch_optimizer_zero_grad)
def _optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    callback = _optimizer_callbacks.get(getattr(self, "_optimizer", self))  # Lightning's wrappers have the user's there
    if callback is None:
        _torch_optimizer_zero_grad(self, set_to_none)
        return
    with without_torch_function():  # parameters may be guarded, see step_gradients
        _torch_optimizer_zero_grad(self, set_to_none)
    callback()


@wraps(_torch_module_zero_grad)
def _module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    forgotten = {parameter for parameter in self.parameters() if forget_shown(parameter, set_to_none)}
    if not forgotten:
        _torch_module_zero_grad(self, set_to_none)
    else:
        for parameter in self.parameters():
            if parameter in forgotten or parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()
    for module in self.modules():
        callback = _module_callbacks.get(module)
        if callback is not None:
            callback()
