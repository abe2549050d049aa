"""Optimizers and gradient scalers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Hooks before the steps of all optimizers; no public name tells whether there are some.
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fsdp_core.torch_private.tensors import without_torch_function

__all__ = [
    "forget_unscaled",
    "has_hooks_before_steps",
    "is_disabled_for_device",
    "make_scaler_sharded",
    "plain_tensors_replicated",
    "replace_step",
]


#: What an optimizer's step calls to compute the loss again.
Closure = Callable[..., Any]


def make_scaler_sharded(scaler: torch.amp.GradScaler, all_reduce_max: Callable[[Tensor], Tensor]) -> None:
    """Make ``scaler`` detect overflow in other ranks' shards.

    ``GradScaler`` decides on each rank separately whether to skip a step; with shards, the ranks would diverge. It also
    can't unscale sharded and replicated gradients in one list. Both happen in ``_unscale_grads_``, the method that
    torch's own ``ShardedGradScaler`` overrides; it is replaced on the instance, so that the class of a user's scaler
    does not change.

    Args:
        scaler: The scaler, changed in place.
        all_reduce_max: All-reduces a tensor of shape ``(1,)`` to its maximum over the ranks.
    """

    def unscale(
        optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad
                with without_torch_function():  # it may be guarded, see step_gradients
                    local = grad.to_local() if hasattr(grad, "to_local") else grad.as_subclass(Tensor)
                gradients.setdefault((local.device, local.dtype), []).append(local)
        flags: dict[torch.device, Tensor] = {inv_scale.device: found_inf.clone()}
        for (device, _), local_gradients in gradients.items():
            flag = flags.setdefault(device, found_inf.to(device, copy=True))
            nonempty = [gradient for gradient in local_gradients if gradient.numel()]
            if nonempty:
                torch._amp_foreach_non_finite_check_and_unscale_(nonempty, flag, inv_scale.to(device))
        return {device: all_reduce_max(flag) for device, flag in flags.items()}

    instance: Any = scaler
    instance._unscale_grads_ = unscale


def is_disabled_for_device(scaler: torch.amp.GradScaler, kind: str) -> bool:
    """Whether a scaler is disabled and for another kind of device: torch disables one whose device is not there."""
    instance: Any = scaler
    return not scaler.is_enabled() and bool(instance._device != kind)


@contextmanager
def plain_tensors_replicated(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Closure], Closure]]:
    """A context for a step of one of torch's optimizers over DTensors and plain tensors that all ranks hold whole.

    On a GPU torch's optimizers compute with lists of tensors (``foreach``) unless told not to, and DTensor refuses a
    list with plain tensors of more than one element, such as the weights of a batch norm. Here it takes them as
    replicated, which they are. torch's own ``implicit_replication()`` would also hold for what a closure computes.

    Args:
        optimizer: The optimizer. For the steps of other libraries, which may mix what is not replicated, the context
            changes nothing.

    Yields:
        A function that wraps a closure, so that it runs as it would outside of the context.
    """
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication

    def as_outside(closure: Closure) -> Closure:
        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            inside = dispatcher._allow_implicit_replication
            dispatcher._allow_implicit_replication = before
            try:
                return closure(*args, **kwargs)
            finally:
                dispatcher._allow_implicit_replication = inside

        return call

    dispatcher._allow_implicit_replication = before or type(optimizer).step.__module__.startswith("torch.optim.")
    try:
        yield as_outside
    finally:
        dispatcher._allow_implicit_replication = before


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let ``scaler`` unscale an optimizer's gradients again, which were discarded since.

    ``GradScaler`` remembers whose gradients it has unscaled until its ``update()``, which only a step allows.

    Args:
        scaler: The scaler.
        optimizer: The optimizer, which has no gradients.
    """
    instance: Any = scaler
    instance._per_optimizer_states.pop(id(optimizer), None)


def has_hooks_before_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of the user's run before an optimizer's ``step()`` calls its closure. No public name tells."""
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Put a function in the place of an optimizer's ``step``.

    A learning-rate scheduler wraps ``step`` at the instance, to note the first call in ``_opt_called``, recognises its
    wrapper by ``_wrapped_by_lr_sched``, and warns if there is another. torch wraps the method of the class to call
    hooks, and marks it ``hooked``.

    Args:
        optimizer: The optimizer, before or after a scheduler was made for it.
        step: Called with the optimizer and the arguments of ``step()``.

    Returns:
        The former ``step`` as a function of the optimizer and the arguments, which calls no hooks; and whether torch
        has called hooks around it.
    """
    current_step: Any = optimizer.step
    has_scheduler = hasattr(current_step, "_wrapped_by_lr_sched")
    own: Any = current_step.__wrapped__ if has_scheduler else getattr(current_step, "__func__", None)
    of_class: Any = type(optimizer).step
    is_hooked = own is of_class and bool(getattr(own, "hooked", False))

    def note_and_step(self: Any, *args: Any, **options: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **options)

    note_and_step.__dict__["_wrapped_by_lr_sched"] = True
    instance: Any = optimizer
    instance.step = MethodType(note_and_step if has_scheduler else step, optimizer)
    if own is None:  # the user has set a function, which does not take the optimizer
        return (lambda _, *args, **options: current_step(*args, **options)), False
    return (own.__wrapped__ if is_hooked else own), is_hooked
