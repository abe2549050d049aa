"""The small tensors of a trial: which stand for which parameters, their gradients, and what a rank has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.state.chunks import own_part
from fsdp_core.state.layout import Layout
from fsdp_core.torch_private import StridedShard

__all__ = [
    "Key",
    "Kind",
    "Shown",
    "Small",
    "as_dtensor",
    "as_it_is",
    "first_run",
    "kind_of",
    "last_run",
    "new_small",
    "new_smalls",
    "smaller",
]

#: The shape of a small tensor, by a parameter's dimensions. Some optimizers treat only large matrices specially.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (150,), 2: (136, 132), 3: (20, 18, 7), 4: (20, 18, 3, 3)}

#: The same where an optimizer might make a matrix of as many rows as a tensor has elements.
_SMALLER: dict[int, tuple[int, ...]] = {0: (), 1: (14,), 2: (12, 10), 3: (6, 5, 4), 4: (5, 4, 3, 2)}


@dataclass(frozen=True)
class Kind:
    """Parameters that an optimizer can distinguish only by their values.

    Attributes:
        shape: The shape of the small tensor that represents them.
        is_flat: Whether each rank holds a contiguous range of the elements.
        trained: Whether they get gradients.
        mesh: The mesh of a DTensor; ``placements`` are its placements.
    """

    shape: tuple[int, ...]
    is_flat: bool
    trained: bool
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()

    def described(self) -> tuple[object, ...]:
        """The kind without its mesh object, whose process groups must not outlive the run."""
        mesh = self.mesh and (self.mesh.device_type, tuple(self.mesh.mesh.flatten().tolist()))
        return self.shape, self.is_flat, self.trained, self.placements, mesh

    def in_runs(self) -> Kind:
        """The same parameters, if each rank held a contiguous range of their elements."""
        return replace(self, is_flat=bool(self.shape), mesh=None, placements=())


#: The param group of a small tensor, and its kind.
Key = tuple[int, Kind]

#: Returns the part of a small tensor that the optimizer gets.
Shown = Callable[[Tensor, Kind], Tensor]


def kind_of(parameter: nn.Parameter, layout: Layout, *, few: bool = False) -> Kind:
    """What represents a parameter; with ``few``, by few elements."""
    part, *more = layout[parameter]
    written = (prod(part.shape),) if more else part.shape
    shape = (_SMALLER if few else _SHAPES).get(len(written), (6, 5, 4, *(3 for _ in written[3:])))
    is_flat = part.range is not None and bool(shape)
    if not isinstance(parameter, DTensor):
        return Kind(shape, is_flat, parameter.requires_grad)
    ranks = parameter.device_mesh.size()
    rows, uneven = parameter.shape[0], parameter.shape[0] % ranks
    first = 1 if rows < ranks else max(1, shape[0] // ranks) * ranks + (1 if uneven else 0)
    dims = [first, *shape[1:]]
    for dim in {placement.dim for placement in parameter.placements if isinstance(placement, Shard)} - {0}:
        dims[dim] = max(1, dims[dim] // ranks) * ranks
        dims[-1] = -(-dims[-1] // (2 * ranks)) * 2 * ranks  # parts of a row have pairs of elements, as rows have
    return Kind(tuple(dims), False, parameter.requires_grad, parameter.device_mesh, parameter.placements)


def smaller(kinds: Mapping[nn.Parameter, Kind]) -> dict[nn.Parameter, Kind]:
    """The same kinds of fewer elements, in runs of which even a matrix of all of them is small."""
    return {p: replace(kind, shape=_SMALLER.get(len(kind.shape), kind.shape)) for p, kind in kinds.items()}


def as_it_is(tensor: Tensor, kind: Kind) -> Tensor:
    """The whole."""
    return tensor


def first_run(tensor: Tensor, kind: Kind) -> Tensor:
    """What one of two ranks holds, if they hold contiguous ranges."""
    return tensor.reshape(-1)[: _cut(tensor)] if kind.is_flat else tensor


def last_run(tensor: Tensor, kind: Kind) -> Tensor:
    """What the other one holds."""
    return tensor.reshape(-1)[_cut(tensor) :] if kind.is_flat else tensor


def _cut(tensor: Tensor) -> int:
    return tensor.numel() * 5 // 26 * 2  # even, see Small.set_gradient


def as_dtensor(tensor: Tensor, kind: Kind) -> Tensor:
    """This rank's part, of a DTensor. All ranks have the same tensor."""
    if kind.mesh is None:
        return tensor
    if any(type(one) is StridedShard for one in kind.placements):
        part = own_part(tensor, kind.mesh, kind.placements).contiguous()
        return DTensor.from_local(part, kind.mesh, kind.placements, shape=tensor.shape, stride=tensor.stride())
    return distribute_tensor(tensor, kind.mesh, kind.placements, src_data_rank=None)


@dataclass(kw_only=True)
class Small:
    """A small tensor that represents a parameter.

    Attributes:
        held: The parameter that the optimizer steps over.
        target: The values that minimize the loss, of the shape of this rank's part of ``held``.
        signs: Factors that flip the sign of some gradient elements, of the shape of ``target``.
        spikes: Factors that make some gradient elements large, of the shape of ``target``.
        is_matrix: Whether the parameter has several dimensions.
    """

    held: nn.Parameter
    target: Tensor
    signs: Tensor
    spikes: Tensor
    is_matrix: bool

    def set_gradient(self, step: int, factor: float = 1.0) -> None:
        """Set the gradient of a step, without communication."""
        now = local_tensor(self.held.detach())
        grad = 3.0 * (now - self.target)
        if step in (1, 2):
            grad *= self.signs  # some optimizers compare signs with those of the momentum
        elif step == 3 and self.is_matrix:  # some check whether a row's gradient is orthogonal to it
            pairs = now.reshape(-1, 2)
            grad = torch.stack([pairs[:, 1], -pairs[:, 0]], 1).view(now.shape)
        elif step == 4:  # some compare its size with that of earlier gradients
            grad *= self.spikes
        grad *= factor
        if isinstance(self.held, DTensor):
            self.held.grad = torch.zeros_like(self.held.detach())
            local_tensor(self.held.grad).copy_(grad)
        else:
            self.held.grad = grad


def new_small(kind: Kind, device: torch.device, shown: Shown, generator: torch.Generator) -> Small:
    """Draw a small tensor and its gradients."""
    start, target, signs = (torch.randn(kind.shape, generator=generator) for _ in range(3))
    spikes = torch.ones(kind.shape)
    spikes.reshape(-1)[_cut(spikes) :] = 30.0
    target.reshape(-1)[: _cut(target)] *= (
        4.0  # so that the norms of the pieces differ, also relative to the parameter's
    )
    signs.reshape(-1)[: _cut(signs)] -= 1.5  # so that most signs flip in one piece, and few in the other
    signs.reshape(-1)[_cut(signs) :] += 1.5
    where = device.type if device.type == "cuda" else "cpu"
    start, target, signs, spikes = (one.to(where) for one in (start, target, signs, spikes))
    return Small(
        held=nn.Parameter(shown(start, kind).detach().clone(), requires_grad=kind.trained),
        target=local_tensor(shown(target, kind)),
        signs=local_tensor(shown(signs.sign(), kind)),
        spikes=local_tensor(shown(spikes, kind)),
        is_matrix=len(kind.shape) > 1,
    )


def new_smalls(
    optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, Kind], shown: Shown, generator: torch.Generator
) -> tuple[dict[Key, Small], dict[int, nn.Parameter]]:
    """A small tensor for each kind in each param group, and what it replaces, by the id of the parameter."""
    smalls: dict[Key, Small] = {}
    stand_ins: dict[int, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = kinds[parameter]
            if (index, kind) not in smalls:
                smalls[index, kind] = new_small(kind, parameter.device, shown, generator)
            stand_ins[id(parameter)] = smalls[index, kind].held
    return smalls, stand_ins
