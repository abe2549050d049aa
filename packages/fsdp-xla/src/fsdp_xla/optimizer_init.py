"""Initial values of an optimizer's state, put on the devices as data.

An optimizer creates zeros at its first step. XLA compiles those as constants of the program, which then differs from
that of the second step, where they are data.

So that every step is the same program, these zeros, and the sums of metrics (``lightning/host_metrics.py``), are put
on the device as data. A program's outputs are also in the order of XLA's tensor ids, which an optimizer's step changes
to its own; so shards are brought into that order when the optimizer is set up (``put_in_order``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FirstSteps"]


class FirstSteps:
    """Takes the initial zeros of each optimizer's state from a function.

    Args:
        zeros: Returns zeros as data on the devices, laid out as the given parameter; ``None`` to let the optimizer
            create them.
    """

    def __init__(self, zeros: Callable[[Tensor], Tensor | None]) -> None:
        self._zeros = zeros
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextmanager
    def replace_zeros(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which an optimizer takes a step; in its first one, it gets zeros of the function."""
        if optimizer in self._optimizers:
            yield
            return
        self._optimizers.add(optimizer)
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with _Zeros(parameters, self._zeros):
            yield


class _Zeros(TorchFunctionMode):
    def __init__(self, parameters: set[int], zeros: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._parameters, self._zeros = parameters, zeros

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # zeros like the optimizer's parameters alone: those that a closure's forward pass creates are like activations
        is_state = func is torch.zeros_like and len(args) == 1 and id(args[0]) in self._parameters
        state = self._zeros(args[0]) if is_state and kwargs.keys() <= {"memory_format"} else None
        return func(*args, **kwargs) if state is None else state
