"""Initial values of an optimizer's state, put on the devices as data.

An optimizer creates zeros at its first step. XLA compiles them as constants, so the program differs from that of the
second step, where the same values are data. To have one program for all steps, these zeros, like the sums of metrics
(``lightning/host_metrics.py``), are put on the device as data.

A program's outputs are in the order of XLA's tensor ids, and an optimizer's step gives parameters new ids in its own
order. So the shards get ids in that order when the optimizer is set up (``put_in_order``).
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
        self._stepped_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextmanager
    def replace_initial_zeros(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context for an optimizer's step. At the first step, it replaces the initial zeros of the state."""
        if optimizer in self._stepped_optimizers:
            yield
            return
        self._stepped_optimizers.add(optimizer)
        parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with _ReplacedZeros(parameter_ids, self._zeros):
            yield


class _ReplacedZeros(TorchFunctionMode):
    def __init__(self, parameter_ids: set[int], zeros: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._parameter_ids, self._zeros = parameter_ids, zeros

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Zeros that a closure's forward pass creates are not replaced: they are like activations, not like parameters.
        is_state = func is torch.zeros_like and len(args) == 1 and id(args[0]) in self._parameter_ids
        state = self._zeros(args[0]) if is_state and kwargs.keys() <= {"memory_format"} else None
        return func(*args, **kwargs) if state is None else state
