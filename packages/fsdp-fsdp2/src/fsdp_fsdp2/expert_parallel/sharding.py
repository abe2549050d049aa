"""Dividing experts among ranks, and which dimension of a rank's experts ``fully_shard`` shards."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

__all__ = ["divide_experts", "sharded_dim", "sharded_dim_of"]


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
