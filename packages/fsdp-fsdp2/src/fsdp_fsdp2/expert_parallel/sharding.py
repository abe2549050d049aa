"""Dividing experts among ranks, and which dimension of a rank's experts ``fully_shard`` shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core import Runtime
from fsdp_core.sharding import MeshAxis

__all__ = ["divide_experts", "is_of_experts", "mean_over_peers", "sharded_dim", "sharded_dim_of", "whole_gradient"]

_AXIS: MeshAxis = "expert_parallel"


def divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Let each rank keep its experts, of which all ranks have all. Needs no communication.

    Args:
        experts: A module whose parameters are stacked along the first dimension.
        mesh: The ranks that divide the experts.
    """
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def sharded_dim(shape: tuple[int, ...], ranks: int) -> int:
    """The dimension along which ranks shard a parameter of some experts: the first that they divide evenly.

    Where there are fewer experts than ranks, sharding along the first one would leave ranks without a part.

    Args:
        shape: The shape of the experts' parameter on one rank.
        ranks: The number of ranks that have the same experts.

    Example:
        >>> sharded_dim((4, 8, 6), 2), sharded_dim((1, 8, 6), 2), sharded_dim((1, 3, 6), 2), sharded_dim((1, 3, 5), 2)
        (0, 1, 2, 0)
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def sharded_dim_of(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """What ``fully_shard`` asks for the placement of a parameter."""

    def placement(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(sharded_dim(tuple(local.shape), ranks))

    return placement


def is_of_experts(tensor: Tensor) -> bool:
    """Whether a parameter or its gradient is of experts that are divided among ranks."""
    return isinstance(tensor, DTensor) and _AXIS in (tensor.device_mesh.mesh_dim_names or ())


def whole_gradient(gradient: Tensor) -> Tensor:
    """What a rank's unreduced gradient of its experts is to a gradient of all, of which ranks take the mean.

    Args:
        gradient: That of this rank's experts, divided by the number of ranks that divide them: ``fully_shard`` takes
            the mean over the other ranks alone.

    Returns:
        A tensor of the parameter's shape, with zeros for the experts of other ranks.
    """
    assert isinstance(gradient, DTensor)
    ranks, rank = gradient.device_mesh.size(), gradient.device_mesh.get_local_rank()
    whole = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    whole.chunk(ranks)[rank].copy_(gradient.to_local() * ranks)
    return whole


def mean_over_peers(
    gradients: Mapping[str, Callable[[], Tensor]], shards: Mapping[str, Tensor], runtime: Runtime
) -> dict[str, Callable[[], Tensor]]:
    """Unreduced gradients of all experts, as functions that read them, from which each rank can take those of its own.

    All ranks must call it, and then those functions that it returns for experts, in the same order.

    Args:
        gradients: Functions that read this rank's unreduced gradients, by parameter name.
        shards: The shards of all parameters, by name.
        runtime: All ranks.
    """
    of_experts = [name for name, shard in shards.items() if is_of_experts(shard)]
    if not of_experts:
        return dict(gradients)
    peers = runtime.along(_AXIS)
    names_by_peer = peers.gather_objects([name for name in of_experts if name in gradients])
    names = {name for names_of_peer in names_by_peer for name in names_of_peer}

    def read_mean(name: str) -> Tensor:
        shard = shards[name]
        gradient = gradients[name]() if name in gradients else torch.zeros(shard.shape, dtype=shard.dtype)
        return peers.all_reduce(gradient.to(runtime.device, copy=True), "mean")

    return {**gradients, **{name: partial(read_mean, name) for name in of_experts if name in names}}
