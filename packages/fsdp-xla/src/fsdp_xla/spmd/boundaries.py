"""What tells XLA where one unit of sharding ends and the next begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn

from fsdp_xla.spmd.partitioning import batch_spec
from fsdp_xla.spmd.sharded_tensors import is_marked, mark, sharding_of

__all__ = ["Boundaries"]


class Boundaries:
    """Hooks by which a step has the form of FSDP, whatever the partitioner would find cheaper.

    - A unit's output is sharded along the batch, so that its weights are gathered, and not its activations.
    - A gradient is sharded as its parameter, so that it is reduced and scattered.
    - The backward pass of a unit ends before that of the unit before it begins, so that gradients don't pile up. This
      is what ``torch_xla.distributed.spmd.xla_sharding.apply_backward_optimization_barrier`` is for; its module hooks
      would make each output a view, which torch then lets nobody change in place.

    Args:
        units: The units, the root among them.
        parameters: All parameters of the root.
        mesh: The mesh, with an axis ``"fsdp"``.
    """

    def __init__(self, units: Iterable[nn.Module], parameters: Iterable[nn.Parameter], mesh: Any) -> None:
        self._with_gradient: list[weakref.ref[nn.Parameter]] = []
        with_gradient = self._with_gradient  # hooks are deep-copied with a module, all but plain functions

        def on_gradient(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if parameter.grad is not None and not is_marked(parameter.grad):
                mark(parameter.grad, sharding_of(parameter))
            with_gradient.append(weakref.ref(parameter))

        def on_gradient_of_output(gradient: Tensor) -> Tensor:
            separate = gradient.clone()
            found = [ref() for ref in with_gradient]
            xm.optimization_barrier_([separate, *(p.grad for p in found if p is not None and p.grad is not None)])
            with_gradient.clear()
            return separate

        def on_output(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.device.type == "xla" and tensor.ndim > 1 and not is_marked(tensor):
                    xs.mark_sharding(tensor, mesh, batch_spec(tensor.ndim))
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(on_gradient_of_output)

        for unit in units:
            unit.register_forward_hook(on_output)
        for parameter in parameters:
            if parameter.is_floating_point():
                required = parameter.requires_grad
                parameter.requires_grad_(True)  # one that is frozen now may be trained later
                parameter.register_post_accumulate_grad_hook(on_gradient)
                parameter.requires_grad_(required)

    def clear(self) -> None:
        """Forget gradients that no backward pass will separate any more."""
        self._with_gradient.clear()


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
