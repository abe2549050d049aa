"""Parameters kept whole on every rank, such as 0-dim ones: their gradients, averaged once a backward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_core.gradients.backward import EndOfBackward
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private.modules import BatchNorm

__all__ = ["ReplicatedParameters", "stays_whole"]


def stays_whole(owner: nn.Module, parameter: nn.Parameter, compute: torch.dtype | None) -> bool:
    """Whether no sharding library of torch's can take a parameter: 0-dim, empty, or of a norm that needs its own dtype.

    Args:
        owner: The module that holds it directly.
        parameter: The parameter.
        compute: The dtype that units compute in, if it is another than that of their shards.
    """
    return (
        parameter.ndim == 0
        or not parameter.numel()
        or (isinstance(owner, BatchNorm) and compute not in (None, parameter.dtype))
    )


class ReplicatedParameters:
    """Keeps the gradients of some parameters equal on all ranks.

    Every backward pass ends with one all-reduce for all of them together, unless :attr:`sync` is off. Ranks may use
    different ones of them, but must run the same backward passes. Hooks that are registered by
    ``register_post_accumulate_grad_hook`` from now on are called after the all-reduce.

    Args:
        parameters: Parameters of ``root`` whose values are the same on every rank.
        root: The module whose forward passes the backward passes belong to.
        runtime: The world to average over.
        accumulates: As :class:`~fsdp_core.sharding.EndOfBackward` takes it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        root: nn.Module,
        runtime: Runtime,
        accumulates: Callable[[], bool] = lambda: True,
    ) -> None:
        self.parameters = tuple(parameters)
        #: Those that have required gradients at some time since the last average; the same on all ranks.
        self._trained = {p for p in self.parameters if p.requires_grad}
        self._runtime = runtime
        self._end = EndOfBackward(self.parameters, root, self._average, accumulates, self._note_trained)
        self._hooks: list[OrderedDict[int, Callable[[nn.Parameter], None]]] = [OrderedDict() for _ in self.parameters]
        for parameter, hooks in zip(self.parameters, self._hooks, strict=True):
            instance: Any = parameter
            instance.register_post_accumulate_grad_hook = partial(_register, hooks)

    @property
    def sync(self) -> bool:
        """Whether backward passes average. Off while gradients are accumulated."""
        return self._end.enabled

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._end.enabled = sync

    @property
    def interrupted(self) -> bool:
        """As :attr:`fsdp_core.sharding.EndOfBackward.interrupted`."""
        return self._end.interrupted

    def forget(self) -> None:
        """Forget a backward pass that an exception has ended. The gradients stay as they are."""
        self._end.forget()

    def _note_trained(self) -> None:
        """Record what is trained, at the end of a backward pass without an average: it may be frozen at the next."""
        self._trained.update(p for p in self.parameters if p.requires_grad)

    def _average(self) -> None:
        # also those that were frozen while their gradients waited for this
        trainable = [p for p in self.parameters if p.requires_grad or p in self._trained]
        self._trained = {p for p in trainable if p.requires_grad}
        if not trainable:
            return
        # fp32 holds the sum of half-precision gradients without overflow; wider dtypes keep their own
        wide_dtype = torch.float32
        for parameter in trainable:
            wide_dtype = torch.promote_types(wide_dtype, parameter.dtype)
        device = trainable[0].device
        has_gradient = torch.tensor([p.grad is not None for p in trainable], dtype=wide_dtype, device=device)
        grads = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).to(wide_dtype) for p in trainable
        ]
        flat = self._runtime.all_reduce(torch.cat([has_gradient, *grads]), "sum")
        ranks_with_gradient, *sums = flat.split([len(trainable), *(p.numel() for p in trainable)])
        for parameter, count, total in zip(trainable, ranks_with_gradient.tolist(), sums, strict=True):
            if count:
                mean = (total / self._runtime.world_size).reshape(parameter.shape).to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = mean
                else:
                    parameter.grad.copy_(mean)
        for parameter, hooks in zip(self.parameters, self._hooks, strict=True):
            if parameter.grad is not None:
                for hook in list(hooks.values()):
                    hook(parameter)


def _register(
    hooks: OrderedDict[int, Callable[[nn.Parameter], None]], hook: Callable[[nn.Parameter], None]
) -> RemovableHandle:
    registered = RemovableHandle(hooks)
    hooks[registered.id] = hook
    return registered
