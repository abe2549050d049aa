"""Parameters kept whole on every rank, such as 0-dim ones: their gradients, averaged once a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.runtime import Runtime
from fsdp_core.torch_private import BatchNorm, queue_backward_callback

__all__ = ["ReplicatedParameters", "stays_whole"]


def stays_whole(owner: nn.Module, parameter: nn.Parameter, compute: torch.dtype | None) -> bool:
    """Whether no sharding library of torch's can take a parameter: 0-dim, or of a norm that needs its own dtype.

    Args:
        owner: The module that holds it directly.
        parameter: The parameter.
        compute: The dtype that units compute in, if it is another than that of their shards.
    """
    return parameter.ndim == 0 or (isinstance(owner, BatchNorm) and compute not in (None, parameter.dtype))


class ReplicatedParameters:
    """Keeps the gradients of some parameters equal on all ranks.

    Every backward pass ends with one all-reduce for all of them together, unless :attr:`sync` is off. Ranks may use
    different ones of them; all must run the same backward passes.

    Args:
        parameters: Parameters of ``root`` whose values are the same on every rank.
        root: The module whose forward passes the backward passes belong to.
        runtime: The world to average over.

    Attributes:
        sync: Whether backward passes average. Off while gradients are accumulated.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], root: nn.Module, runtime: Runtime) -> None:
        self.parameters = tuple(parameters)
        self.sync = True
        self._runtime = runtime
        self._queued = False
        for parameter in self.parameters:
            required = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook can't be placed otherwise, and it may be unfrozen later
            parameter.register_post_accumulate_grad_hook(self._at_end_of_backward)
            parameter.requires_grad_(required)
        root.register_forward_pre_hook(self._before_forward)
        root.register_forward_hook(self._after_forward)

    def _before_forward(self, root: nn.Module, args: Any) -> None:
        self._queued = False  # an exception may have ended the last backward pass before its end

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        """Let a backward pass from ``output`` average, also if it reaches none of the parameters itself.

        Gradients of the micro-batches before it may be waiting.
        """
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._at_end_of_backward)

    def _at_end_of_backward(self, _: Tensor) -> None:
        if self.sync and not self._queued:
            self._queued = True
            queue_backward_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        trainable = [p for p in self.parameters if p.requires_grad]
        if not trainable:
            return
        # fp32 holds the sum of half-precision gradients without overflow; wider dtypes keep their own
        wide = torch.float32
        for parameter in trainable:
            wide = torch.promote_types(wide, parameter.dtype)
        device = trainable[0].device
        has = torch.tensor([p.grad is not None for p in trainable], dtype=wide, device=device)
        grads = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).to(wide) for p in trainable]
        flat = self._runtime.all_reduce(torch.cat([has, *grads]), "sum")
        has, *sums = flat.split([len(trainable), *(p.numel() for p in trainable)])
        for parameter, used, total in zip(trainable, has.tolist(), sums, strict=True):
            if used:
                mean = (total / self._runtime.world_size).reshape(parameter.shape).to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = mean
                else:
                    parameter.grad.copy_(mean)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
