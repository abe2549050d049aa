"""The end of a backward pass: where gradients are complete on this rank, and their reduction begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.torch_private.autograd import queue_backward_callback

__all__ = ["EndOfBackward"]


class EndOfBackward:
    """Calls a function once at the end of every backward pass, unless :attr:`enabled` is off.

    A backward pass counts if it computes a gradient of one of the parameters, or starts from what a forward pass of the
    root returned: also where it reaches none of the parameters, for other ranks may wait. All ranks must run the same
    backward passes.

    Args:
        parameters: Parameters of ``root``.
        root: The module whose forward passes the backward passes belong to.
        call: The function to call. The gradients are at the parameters then.
        accumulates: Whether the backward pass that runs adds to gradients of ``root``. One that does not, as
            ``torch.autograd.grad``, does not count.
        call_disabled: The function to call instead while :attr:`enabled` is off.

    Attributes:
        enabled: Whether ``call`` is called.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> end = EndOfBackward(list(layer.parameters()), layer, lambda: print("reduce", layer.weight.grad))
        >>> layer(torch.ones(1, 2)).sum().backward()
        reduce tensor([[1., 1.]])
        >>> with end.disabled():
        ...     layer(torch.ones(1, 2)).sum().backward()
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        root: nn.Module,
        call: Callable[[], None],
        accumulates: Callable[[], bool] = lambda: True,
        call_disabled: Callable[[], None] | None = None,
    ) -> None:
        self.enabled = True
        self._call_disabled = call_disabled
        self._accumulates = accumulates
        self._call = call
        self._is_queued = False  # at autograd's engine, for the end of the backward pass that runs
        # Parameters' hooks refer to this object weakly, and the root's hooks keep it alive. The garbage collector does
        # not look into a parameter's hooks: a cycle through one, process groups included, would never be freed.
        self._queue_while_alive = _call_weakly(self._queue)
        for parameter in parameters:
            self.follow(parameter)
        root.register_forward_pre_hook(self._before_forward)
        root.register_forward_hook(self._after_forward)

    def follow(self, parameter: nn.Parameter) -> None:
        """Add a parameter: backward passes that compute its gradient count too."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # integers never get gradients
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)  # else torch registers no hook; it may be unfrozen later
        parameter.register_post_accumulate_grad_hook(self._queue_while_alive)
        parameter.requires_grad_(requires_grad)

    @property
    def interrupted(self) -> bool:
        """Whether a backward pass has begun and not come to its end.

        If that is so when a forward pass begins, an exception has ended the backward pass.
        """
        return self._is_queued

    def forget(self) -> None:
        """Forget a backward pass that has failed with an exception."""
        self._is_queued = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which :attr:`enabled` is off. At its end it is on, also if it was off before."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def _before_forward(self, root: nn.Module, args: Any) -> None:
        self._is_queued = False  # the last backward pass may have failed with an exception

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        """Notice a backward pass from ``output``: gradients of the micro-batches before it may be waiting."""
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue_if_accumulating)

    def _queue_if_accumulating(self, gradient: Tensor) -> None:
        if not self._is_queued and self._accumulates():
            self._queue(gradient)

    def _queue(self, _: Tensor) -> None:
        if not self._is_queued and (self.enabled or self._call_disabled is not None):
            self._is_queued = True
            queue_backward_callback(self._end)

    def _end(self) -> None:
        self._is_queued = False
        if self.enabled:
            self._call()
        elif self._call_disabled is not None:
            self._call_disabled()


def _call_weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a function that calls a method, and does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def call_if_alive(tensor: Tensor) -> None:
        live_method = reference()
        if live_method is not None:
            live_method(tensor)

    return call_if_alive


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
