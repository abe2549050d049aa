"""Small parameters that stand for a model's in a trial: their shapes, their gradients, and a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core.devices import is_accelerator
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.state.chunks import own_part
from fsdp_core.state.layout import Layout
from fsdp_core.torch_private.dtensors import StridedShard

__all__ = [
    "Key",
    "ParamSpec",
    "SmallParam",
    "Specs",
    "View",
    "as_dtensor",
    "as_first_shard",
    "as_last_shard",
    "as_unsharded",
    "new_small_param",
    "new_small_params",
    "shrink_specs",
    "spec_of",
]

#: A small parameter's shape, by the number of dimensions of the parameters that it stands for. Matrices are not too
#: small, since some optimizers treat only large ones specially.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (150,), 2: (136, 132), 3: (20, 18, 7), 4: (20, 18, 3, 3)}

#: The same for optimizers that may make a matrix with as many rows as a tensor has elements.
_SHRUNK_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (14,), 2: (12, 10), 3: (6, 5, 4), 4: (5, 4, 3, 2)}


@dataclass(frozen=True)
class ParamSpec:
    """What an optimizer can distinguish parameters by, apart from their values.

    Attributes:
        shape: The shape of the small parameter that stands for them.
        is_flat: Whether each rank has a contiguous range of the elements.
        requires_grad: Whether they get gradients.
        mesh: The mesh of a DTensor; ``placements`` are its placements.
    """

    shape: tuple[int, ...]
    is_flat: bool
    requires_grad: bool
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()

    def flattened(self) -> ParamSpec:
        """The same parameters, if each rank had a contiguous range of their elements."""
        return replace(self, is_flat=bool(self.shape), mesh=None, placements=())


#: The specs of an optimizer's parameters.
Specs = Mapping[nn.Parameter, ParamSpec]

#: The param group of a small parameter, and its spec.
Key = tuple[int, ParamSpec]

#: Returns the part of a tensor that the optimizer gets.
View = Callable[[Tensor, ParamSpec], Tensor]


def spec_of(parameter: nn.Parameter, layout: Layout) -> ParamSpec:
    """The spec of a parameter that an optimizer holds."""
    part, *more_parts = layout[parameter]
    full_shape = (prod(part.shape),) if more_parts else part.shape
    shape = _SHAPES.get(len(full_shape), (6, 5, 4, *(3 for _ in full_shape[3:])))
    if not isinstance(parameter, DTensor):
        is_flat = part.range is not None and bool(shape)
        return ParamSpec(shape, is_flat=is_flat, requires_grad=parameter.requires_grad)
    ranks = parameter.device_mesh.size()
    dims = [*shape]
    # as for the parameter: some ranks have no row, or all have as many, or some have one more
    if parameter.shape[0] < ranks:
        dims[0] = 1
    else:
        dims[0] = max(1, shape[0] // ranks) * ranks + (1 if parameter.shape[0] % ranks else 0)
    for dim in {placement.dim for placement in parameter.placements if isinstance(placement, Shard)} - {0}:
        dims[dim] = max(1, dims[dim] // ranks) * ranks
        # set_gradient takes pairs of elements of a row: each part of a row has an even number
        dims[-1] = -(-dims[-1] // (2 * ranks)) * 2 * ranks
    return ParamSpec(
        tuple(dims),
        is_flat=False,
        requires_grad=parameter.requires_grad,
        mesh=parameter.device_mesh,
        placements=parameter.placements,
    )


def shrink_specs(specs: Specs) -> Specs:
    """The same specs with few elements: even a square matrix with a row for each of them is small."""
    return {p: replace(spec, shape=_SHRUNK_SHAPES.get(len(spec.shape), spec.shape)) for p, spec in specs.items()}


def as_unsharded(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """The whole tensor, as on one process."""
    return tensor


def as_first_shard(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """What the first of two ranks has, if they have contiguous ranges."""
    return tensor.reshape(-1)[: _boundary(tensor)] if spec.is_flat else tensor


def as_last_shard(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """What the last of two ranks has, if they have contiguous ranges."""
    return tensor.reshape(-1)[_boundary(tensor) :] if spec.is_flat else tensor


def _boundary(tensor: Tensor) -> int:
    """Where the first rank's range ends, at some two fifths: even, since set_gradient takes pairs of elements."""
    return tensor.numel() * 5 // 26 * 2


def as_dtensor(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """A DTensor with this rank's shard. All ranks have the same tensor."""
    if spec.mesh is None:
        return tensor
    if any(type(placement) is StridedShard for placement in spec.placements):
        local = own_part(tensor, spec.mesh, spec.placements).contiguous()
        return DTensor.from_local(local, spec.mesh, spec.placements, shape=tensor.shape, stride=tensor.stride())
    return distribute_tensor(tensor, spec.mesh, spec.placements, src_data_rank=None)


@dataclass(kw_only=True)
class SmallParam:
    """A small parameter that stands for others.

    Attributes:
        param: What the optimizer steps over.
        target: The values that minimize the loss, of the shape of this rank's part of ``param``.
        signs: Factors that flip the sign of some gradient elements, of the shape of ``target``.
        spikes: Factors that make some gradient elements large, of the shape of ``target``.
        is_matrix: Whether the full parameter has several dimensions.
    """

    param: nn.Parameter
    target: Tensor
    signs: Tensor
    spikes: Tensor
    is_matrix: bool

    def set_gradient(self, step: int, scale: float = 1.0) -> None:
        """Set the gradient of a step, without communication."""
        if not self.param.requires_grad:
            return
        values = local_tensor(self.param.detach())
        grad = 3.0 * (values - self.target)
        if step in (1, 2):
            grad *= self.signs  # some optimizers compare signs with those of the momentum
        elif step == 3 and self.is_matrix:  # some check whether a row's gradient is orthogonal to it
            pairs = values.reshape(-1, 2)
            grad = torch.stack([pairs[:, 1], -pairs[:, 0]], 1).view(values.shape)
        elif step == 4:  # some compare its size with that of earlier gradients
            grad *= self.spikes
        if isinstance(self.param, DTensor):
            self.param.grad = torch.zeros_like(self.param.detach())
            local_tensor(self.param.grad).copy_(grad * scale)
        else:
            self.param.grad = grad * scale


def new_small_param(spec: ParamSpec, device: torch.device, view: View, generator: torch.Generator) -> SmallParam:
    """Draw a small parameter and its gradients."""
    start, target, signs = (torch.randn(spec.shape, generator=generator) for _ in range(3))
    spikes = torch.ones(spec.shape)
    boundary = _boundary(start)
    # The shards' norms differ, also relative to the parameters'; most signs flip in one shard, and few in the other.
    target.reshape(-1)[:boundary] *= 4.0
    signs.reshape(-1)[:boundary] -= 1.5
    signs.reshape(-1)[boundary:] += 1.5
    spikes.reshape(-1)[boundary:] = 30.0
    tensors = [t.to(device if is_accelerator(device) else "cpu") for t in (start, target, signs.sign(), spikes)]
    param, target, signs, spikes = (view(tensor, spec) for tensor in tensors)
    return SmallParam(
        param=nn.Parameter(param.detach().clone(), requires_grad=spec.requires_grad),
        target=local_tensor(target),
        signs=local_tensor(signs),
        spikes=local_tensor(spikes),
        is_matrix=len(spec.shape) > 1,
    )


def new_small_params(
    optimizer: torch.optim.Optimizer, specs: Specs, view: View, generator: torch.Generator
) -> tuple[dict[Key, SmallParam], dict[int, nn.Parameter]]:
    """A small parameter for each spec in each param group, and by each parameter's id the one that replaces it."""
    small_params: dict[Key, SmallParam] = {}
    replacements: dict[int, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = index, specs[parameter]
            if key not in small_params:
                small_params[key] = new_small_param(key[1], parameter.device, view, generator)
            replacements[id(parameter)] = small_params[key].param
    return small_params, replacements
