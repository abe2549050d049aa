"""``optimizer.zero_grad()`` amid an accumulation: what waits for a reduction is given up with the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

__all__ = ["when_zeroed"]

_then: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()


def when_zeroed(optimizer: Optimizer, then: Callable[[], None]) -> None:
    """Call a function at the end of each ``zero_grad()`` of an optimizer, in the place of one that was given before.

    torch has hooks to an optimizer's steps, and none to this. Lightning's wrappers of optimizers find the method at
    their class, and not at the optimizer; so torch's method is replaced, once for the process, by one that calls it
    and does nothing more for any other optimizer.

    Args:
        optimizer: The user's.
        then: What to call. It must not keep the optimizer alive.
    """
    _then[optimizer] = then
    if Optimizer.zero_grad is not _zero_grad:
        Optimizer.zero_grad = _zero_grad  # type: ignore[method-assign]


_torchs = Optimizer.zero_grad


@wraps(_torchs)
def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    _torchs(self, set_to_none)
    then = _then.get(getattr(self, "_optimizer", self))  # Lightning's wrappers have the user's there
    if then is not None:
        then()
