"""Accumulated gradients of a pending optimizer step: saved to a checkpoint and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.gradients.clipping import is_sharded_dtensor
from fsdp_core.mesh import GRADIENT_AXES
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.filling import fill
from fsdp_core.state.layout import Layout
from fsdp_core.state.saved_tensor import SavedTensor
from fsdp_core.torch_private.tensors import without_torch_function

__all__ = [
    "HeldGradients",
    "describe_gradients",
    "gradients_of_rank",
    "held_at_parameters",
    "refuse_half_gradients",
    "restore_at_parameters",
]


def refuse_half_gradients(module: nn.Module, parameters: Iterable[nn.Parameter], *, incomplete: bool = False) -> None:
    """Refuse to continue with gradients that an exception has left incomplete.

    Args:
        module: The module whose backward pass the exception interrupted.
        parameters: The parameters of the module that an optimizer may hold.
        incomplete: Whether there are incomplete gradients that the library holds elsewhere than at the parameters.

    Raises:
        ShardingError: There is a gradient.
    """
    # Without elements, a rank's piece shows users a gradient although it has none.
    with without_torch_function():
        has_gradient = any(parameter.grad is not None for parameter in parameters)
    if incomplete or has_gradient:
        raise ShardingError(
            f"an exception has interrupted a backward pass of {type(module).__name__}, and some of its gradients may "
            "be incomplete.\n"
            "Call optimizer.zero_grad() before the next forward pass."
        )


@dataclass(frozen=True, kw_only=True)
class HeldGradients:
    """This rank's gradients, by parameter name.

    Attributes:
        own: Gradients of this rank that have not been reduced yet, at the parameter's shape. They are averaged over the
            ranks before the step.
        reduced: Gradients that are averaged over the ranks already, in the layout of the shards.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    reduced: dict[str, Tensor | ChunkedTensor] = field(default_factory=dict)


def held_at_parameters(layout: Layout) -> HeldGradients:
    """Return the ``.grad`` of a layout's parameters, sharing memory with them."""
    gradients = HeldGradients()
    for parameter, parts in layout.items():
        grad = parameter.grad
        if grad is None:
            continue
        for part in parts:
            if part.range is not None or isinstance(grad, DTensor):
                gradients.reduced[part.name] = part.of(grad)
            else:
                gradients.own[part.name] = grad
    return gradients


def restore_at_parameters(
    layout: Layout,
    module: str,
    own: Mapping[str, Callable[[], Tensor]],
    reduced: Mapping[str, Tensor | SavedTensor],
) -> None:
    """Replace the gradients of a layout's parameters.

    Args:
        layout: The parameters.
        module: The class name of their module, for the error.
        own: Functions that read this rank's unreduced gradients, by parameter name.
        reduced: The reduced gradients, by parameter name.

    Raises:
        CheckpointMismatchError: No parameter can take a gradient, or a shape differs.
    """
    parameter_and_part = {part.name: (p, part) for p, parts in layout.items() for part in parts}
    for name in [name for name in (*own, *reduced) if name not in parameter_and_part]:
        raise _no_such_gradient(name, module)
    for parameter in layout:
        parameter.grad = None
    for name, read_gradient in own.items():
        parameter, part = parameter_and_part[name]
        if isinstance(parameter, DTensor) or part.range is not None:
            raise _no_such_gradient(name, module)
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
        fill(parameter.grad, read_gradient(), cast=True)
    for name, grad in reduced.items():
        parameter, part = parameter_and_part[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        restored_grad = torch.zeros_like(parameter.grad)
        fill(part.of(restored_grad), grad, cast=True)
        parameter.grad += restored_grad


def _no_such_gradient(name: str, module: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the checkpoint holds an accumulated gradient of {name!r}, but {module} has no such parameter that can take "
        "it.\nLoad it into the model that it was saved from, or load only the weights."
    )


def describe_gradients(gradients: HeldGradients, runtime: Runtime) -> dict[str, Any] | None:
    """Describe gradients as part of a state to save, with the same names on every rank. All ranks must call it.

    Args:
        gradients: This rank's gradients.
        runtime: The ranks.

    Returns:
        ``{"own": {rank: {name: tensor}}, "reduced": {name: tensor}}``, sharing memory with the gradients; ``None`` if
        no rank holds any. ``rank`` counts the ranks that average gradients, and is a string, as all keys in a manifest.
    """
    own_specs = {name: (tuple(grad.shape), grad.dtype) for name, grad in gradients.own.items()}
    specs_by_rank = runtime.gather_objects(own_specs)
    if not any(specs_by_rank) and not gradients.reduced:
        return None
    mesh = runtime.mesh
    own_coordinate = mesh.coordinate(runtime.rank, GRADIENT_AXES)
    peers = mesh.peers(runtime.rank, ("tensor_parallel",))
    return {
        "own": {
            str(index): {
                name: _as_chunked(
                    gradients.own[name] if index == own_coordinate else None,
                    shape=shape,
                    dtype=dtype,
                    saves_for_peers=runtime.rank == peers[0],
                )
                for name, (shape, dtype) in specs_by_rank[rank].items()
            }
            for index, rank in enumerate(mesh.peers(0, GRADIENT_AXES))
        },
        "reduced": dict(gradients.reduced),
    }


def _as_chunked(
    grad: Tensor | None, *, shape: tuple[int, ...], dtype: torch.dtype, saves_for_peers: bool
) -> ChunkedTensor:
    """Describe a gradient of one data-parallel rank: its chunks on that rank and its tensor-parallel peers.

    Args:
        grad: The gradient, if this is such a rank; otherwise ``None``.
        shape: Its shape.
        dtype: Its dtype.
        saves_for_peers: Whether this is the first of the tensor-parallel peers, which saves what all of them hold.
    """
    chunks: tuple[Chunk, ...] = ()
    if isinstance(grad, DTensor):
        chunks = chunked(grad).chunks if saves_for_peers or is_sharded_dtensor(grad) else ()
    elif grad is not None and saves_for_peers and 0 not in shape:
        chunks = (Chunk(offsets=(0,) * len(shape), data=grad.detach()),)
    return ChunkedTensor(shape=shape, dtype=dtype, chunks=chunks)


def gradients_of_rank(saved: Mapping[str, Any], runtime: Runtime) -> dict[str, Callable[[], Tensor]]:
    """Return the unreduced gradients that this rank resumes with.

    Args:
        saved: As returned by :func:`describe_gradients`.
        runtime: The ranks.

    Returns:
        Functions that read a full gradient, by name. If as many ranks average gradients as when they were saved, each
        rank gets its own; otherwise all get the mean of the saved ones, so that their mean stays the same.
    """
    own: Mapping[str, Mapping[str, Any]] = saved["own"]
    if len(own) == runtime.mesh.size(GRADIENT_AXES):
        own_coordinate = runtime.mesh.coordinate(runtime.rank, GRADIENT_AXES)
        return {name: partial(_read_full, grad) for name, grad in own[str(own_coordinate)].items()}
    names = dict.fromkeys(name for grads in own.values() for name in grads)
    return {name: partial(_read_mean, [grads.get(name) for grads in own.values()]) for name in names}


def _read_full(grad: Tensor | SavedTensor) -> Tensor:
    return grad.full() if isinstance(grad, SavedTensor) else grad


def _read_mean(grads: list[Tensor | SavedTensor | None]) -> Tensor:
    total: Tensor | None = None
    dtype = torch.float32
    for grad in grads:
        if grad is not None:
            dtype = grad.dtype
            widened_grad = _read_full(grad).to(torch.promote_types(dtype, torch.float32))
            total = widened_grad if total is None else total + widened_grad
    assert total is not None  # every name comes from some rank
    return (total / len(grads)).to(dtype)
