"""What tells XLA where one unit of sharding ends and the next begins.

Leaf modules' outputs are marked, and not only units', as torch_xla's own wrapper does: with units alone XLA's
partitioner was seen to gather activations instead of weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from fsdp_xla.spmd.partitioning import batch_spec
from fsdp_xla.spmd.runtime import MODEL_AXIS
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, mark, mark_as, sharding_of

__all__ = ["Boundaries"]


class Boundaries:
    """Hooks by which a step has the form of FSDP. Left alone, the partitioner gathers activations where weights differ.

    - What a unit, or a module without submodules, returns is sharded along the batch, and so is its gradient: then it
      is the weights that are gathered. On a mesh with an axis ``"model"`` this is left to units alone, between whose
      ends a tensor plan has activations cut otherwise.
    - A gradient is sharded as its parameter, so that it is reduced and scattered.
    - The backward pass of a unit ends before that of the unit before it begins, so that gradients don't pile up. This
      is what ``torch_xla.distributed.spmd.xla_sharding.apply_backward_optimization_barrier`` is for; its module hooks
      would make each output a view, which torch then lets nobody change in place.

    Args:
        root: The root, which is a unit too.
        units: Its units.
        mesh: The mesh, with an axis ``"fsdp"``.
    """

    def __init__(self, root: nn.Module, units: Iterable[nn.Module], mesh: Any) -> None:
        self._with_gradient: list[weakref.ref[nn.Parameter]] = []
        with_gradient = self._with_gradient  # hooks are deep-copied with a module, all but plain functions

        def shard(tensor: Tensor) -> None:
            if tensor.device.type == "xla" and tensor.ndim > 1 and 0 not in tensor.shape and not is_marked(tensor):
                mark_as(tensor, mesh, batch_spec(tensor.ndim))

        def on_gradient(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if parameter.grad is not None and not is_marked(parameter.grad):
                mark(parameter.grad, sharding_of(parameter))
            with_gradient.append(weakref.ref(parameter))

        def on_gradient_inside(gradient: Tensor) -> None:
            shard(gradient)

        def on_gradient_between(gradient: Tensor) -> Tensor:
            separate = gradient.clone()
            found = [ref() for ref in with_gradient]
            xm.optimization_barrier_([separate, *(p.grad for p in found if p is not None and p.grad is not None)])
            with_gradient.clear()
            shard(separate)
            return separate

        def on_output_inside(module: nn.Module, args: Any, output: Any) -> None:
            on_output(output, on_gradient_inside)

        def on_output_between(module: nn.Module, args: Any, output: Any) -> None:
            on_output(output, on_gradient_between)

        def on_output(output: Any, on_its_gradient: Callable[[Tensor], Tensor | None]) -> None:
            for tensor in _tensors(output):
                shard(tensor)
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(on_its_gradient)

        ends = {root, *units}
        for module in root.modules():
            if module in ends:
                module.register_forward_hook(on_output_between)
            elif MODEL_AXIS not in mesh.axis_names and not any(True for _ in module.children()):
                module.register_forward_hook(on_output_inside)
        for parameter in root.parameters():
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
