"""Marks the boundaries between units of sharding for XLA.

Outputs of leaf modules are marked, not only those of units, as in torch_xla's own wrapper: with units alone, XLA's
partitioner was observed to gather activations instead of weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from fsdp_core import ShardingError
from fsdp_xla.spmd.partitioning import batch_spec
from fsdp_xla.spmd.runtime import MODEL_AXIS
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, mark, mark_as, sharding_of

__all__ = ["Boundaries"]


class Boundaries:
    """Hooks that make the partitioner run a step as FSDP. Without them it may gather activations instead of weights.

    - The output of a unit, or of a module without submodules, is sharded along the batch, and so is its gradient, so
      that weights are gathered. On a mesh with an axis ``"model"`` this applies to units only, because a tensor plan
      shards activations inside them differently.
    - A gradient is sharded like its parameter, so that it is reduce-scattered.
    - The backward pass of a unit ends before that of the previous unit begins, so that unreduced gradients don't pile
      up. ``torch_xla.distributed.spmd.xla_sharding.apply_backward_optimization_barrier`` serves the same purpose, but
      its module hooks turn each output into a view, which torch does not allow to be modified in place.

    Args:
        root: The root, which is also a unit.
        units: Its units.
        mesh: The mesh, with an axis ``"fsdp"``.
    """

    def __init__(self, root: nn.Module, units: Iterable[nn.Module], mesh: Any) -> None:
        # Parameters that got a gradient since the last barrier. The hooks are closures over this list, because a deep
        # copy of the module shares functions, but would copy an object with methods.
        self._reached_parameters: list[weakref.ref[nn.Parameter]] = []
        reached_parameters = self._reached_parameters

        def shard(tensor: Tensor) -> None:
            if tensor.device.type == "xla" and tensor.ndim > 1 and 0 not in tensor.shape and not is_marked(tensor):
                mark_as(tensor, mesh, batch_spec(tensor.ndim))

        def on_gradient(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if parameter.grad is not None and not is_marked(parameter.grad):
                sharding = sharding_of(parameter)
                if sharding is None:
                    raise ShardingError(
                        f"a forward pass has written to a parameter of shape {tuple(parameter.shape)} by an assignment "
                        "to its .data, and what was assigned is no shard any more.\n"
                        "Write in on_train_batch_end(), in place (p.data.clamp_(-0.01, 0.01)), or within "
                        "fsdp_core.gathered(module, modifier_rank=0) there."
                    )
                mark(parameter.grad, sharding)
            reached_parameters.append(weakref.ref(parameter))

        def on_gradient_inside(gradient: Tensor) -> None:
            shard(gradient)

        def on_gradient_between(gradient: Tensor) -> Tensor:
            separate_gradient = gradient.clone()
            parameters = [ref() for ref in reached_parameters]
            parameter_gradients = [p.grad for p in parameters if p is not None and p.grad is not None]
            xm.optimization_barrier_([separate_gradient, *parameter_gradients])
            reached_parameters.clear()
            shard(separate_gradient)
            return separate_gradient

        def on_output_inside(module: nn.Module, args: Any, output: Any) -> None:
            on_output(output, on_gradient_inside)

        def on_output_between(module: nn.Module, args: Any, output: Any) -> None:
            on_output(output, on_gradient_between)

        def on_output(output: Any, gradient_hook: Callable[[Tensor], Tensor | None]) -> None:
            for tensor in _tensors(output):
                shard(tensor)
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(gradient_hook)

        all_units = {root, *units}
        for module in root.modules():
            if module in all_units:
                module.register_forward_hook(on_output_between)
            elif MODEL_AXIS not in mesh.axis_names and not any(True for _ in module.children()):
                module.register_forward_hook(on_output_inside)
        for parameter in root.parameters():
            if parameter.is_floating_point():
                # A frozen parameter gets the hook too, because it may be trained later; torch refuses it while frozen.
                was_trained = parameter.requires_grad
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(on_gradient)
                parameter.requires_grad_(was_trained)

    def clear(self) -> None:
        """Forget the parameters reached so far: no further barrier separates their gradients."""
        self._reached_parameters.clear()


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
