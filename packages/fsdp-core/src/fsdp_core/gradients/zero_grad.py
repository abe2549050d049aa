"""``zero_grad()`` within an accumulation: what waits for a reduction is given up with the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fsdp_core.gradients.step_gradients import forget_shown
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = ["on_zero_grad"]

_of_optimizers: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()
_of_modules: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()


def on_zero_grad(owner: Optimizer | nn.Module, then: Callable[[], None]) -> None:
    """Call a function at the end of each ``zero_grad()`` of an optimizer, or of a module or what is around it.

    torch has hooks to an optimizer's steps, and none to this. Lightning's wrappers of optimizers and modules find the
    method at their class, and not at what they are around; so torch's methods are replaced, once for the process, by
    those that call it and do nothing more for any other.

    Args:
        owner: The user's optimizer, or a module.
        then: What to call, instead of what was given before. It must not keep ``owner`` alive.
    """
    if isinstance(owner, Optimizer):
        _of_optimizers[owner] = then
    else:
        _of_modules[owner] = then
    if Optimizer.zero_grad is not _optimizer_zero_grad:
        Optimizer.zero_grad = _optimizer_zero_grad  # type: ignore[method-assign]
        nn.Module.zero_grad = _module_zero_grad  # type: ignore[method-assign]


_optimizers_own = Optimizer.zero_grad
_modules_own = nn.Module.zero_grad


@wraps(_optimizers_own)
def _optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    then = _of_optimizers.get(getattr(self, "_optimizer", self))  # Lightning's wrappers have the user's there
    if then is None:
        _optimizers_own(self, set_to_none)
        return
    with without_torch_function():  # parameters may be guarded, see step_gradients
        _optimizers_own(self, set_to_none)
    then()


@wraps(_modules_own)
def _module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    forgotten = {parameter for parameter in self.parameters() if forget_shown(parameter, set_to_none)}
    if not forgotten:
        _modules_own(self, set_to_none)
    for parameter in self.parameters() if forgotten else ():
        if parameter not in forgotten and parameter.grad is not None:
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()
    for module in self.modules():
        then = _of_modules.get(module)
        if then is not None:
            then()
