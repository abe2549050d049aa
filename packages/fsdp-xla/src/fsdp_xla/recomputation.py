"""Activation checkpointing on XLA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_xla.utils.checkpoint import checkpoint

from fsdp_core import UnsupportedCapabilityError
from fsdp_xla.torch_xla_private.devices import (
    computes_all_gradients,
    default_device,
    set_default_device,
    tree_flatten,
    tree_unflatten,
)

__all__ = ["recompute"]


class _Call(nn.Module):
    """A call of a function with flat arguments. It is a module, because torch_xla looks for the weights in one."""

    def __init__(self, module: nn.Module | None, function: Callable[..., Any], spec: Any) -> None:
        super().__init__()
        self.module, self.function, self.spec = module, function, spec
        self.output_spec: Any = None

    def run(self, anchor: Tensor, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        outputs, self.output_spec = tree_flatten(self.function(*args, **kwargs))
        return tuple(outputs)


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and keep only its inputs; the backward pass calls it again, with the same random numbers.

    torch's own checkpointing has no effect on XLA, which finds the same computation twice in a program and does it
    once. torch_xla's checkpointing puts a barrier between the two. It does not support keyword arguments, nested
    outputs, and calls in which no input requires gradients, so they are added here.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    owner = getattr(function, "__self__", None)
    call = _Call(owner if isinstance(owner, nn.Module) else None, function, spec)
    # An input that requires gradients, so that the outputs do too if no other input does.
    anchor = torch.zeros((), device="xla", requires_grad=True)
    outputs = checkpoint(call.run, anchor, *leaves)
    device = default_device()

    def before_backward(_: Tensor) -> None:
        # torch_xla restores the random generator of the default device, which in autograd's thread is always the first.
        set_default_device(device)
        if not computes_all_gradients():
            raise UnsupportedCapabilityError(
                "torch.autograd.grad() and backward(inputs=...) can't go through a module that "
                "activation_checkpointing_policy recomputes on XLA devices: torch_xla recomputes it within a backward "
                "pass to all parameters.\n"
                "Leave activation_checkpointing_policy out, or call loss.backward(); strategy='fsdp2' can do both."
            )

    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)
    return tree_unflatten(list(outputs), call.output_spec)
