"""Parameters that can't be sharded (0-dim ones): whole on every rank, their gradients averaged once per backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_core.runtime import Runtime
from fsdp_core.torch_private import queue_backward_callback

__all__ = ["ReplicatedParameters"]


class ReplicatedParameters:
    """Keeps the gradients of some parameters equal on all ranks.

    Every backward pass that reaches one of them ends with one all-reduce for all of them together, unless :attr:`sync`
    is off. All ranks must agree on which backward passes reach them, as with any data-parallel parameter.

    Args:
        parameters: Parameters whose values are the same on every rank.
        runtime: The world to average over.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], runtime: Runtime) -> None:
        self.parameters = tuple(parameters)
        self.sync = True
        self._runtime = runtime
        self._queued = False
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, parameter: torch.Tensor) -> None:
        if self.sync and not self._queued:
            self._queued = True
            queue_backward_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        grads = [p.grad for p in self.parameters if p.grad is not None]
        # fp32 holds the sum of half-precision gradients without overflow; wider dtypes keep their own
        wide = torch.float32
        for grad in grads:
            wide = torch.promote_types(wide, grad.dtype)
        flat = torch.cat([g.detach().reshape(-1).to(wide) for g in grads])
        self._runtime.all_reduce(flat, "mean")
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.reshape(grad.shape))
