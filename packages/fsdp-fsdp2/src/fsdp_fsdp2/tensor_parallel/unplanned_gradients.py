"""Gradients that tensor-parallel ranks should have alike, because the plan does not divide their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core import Runtime, ShardingError
from fsdp_core.state import Layout
from fsdp_fsdp2.meshes import ranks_along

__all__ = ["check_unplanned"]

#: How far a rank's gradient may be from the mean of its peers', relative to the mean's norm. Peers compute the same
#: from the same batch, up to the order of sums in some kernels; where each sees another part, they differ by about 1.
TOLERANCE = 0.05


def check_unplanned(parameters: Iterable[Tensor], layout: Layout, runtime: Runtime) -> None:
    """Compare the gradients of parameters that no plan divides between tensor-parallel ranks. All ranks must call it.

    A module between two divided layers that the plan leaves out, such as a norm of each head, sees what its rank has
    computed. Its gradients would have to be summed over the ranks; without that, each rank trains its own copy.

    Args:
        parameters: An optimizer's parameters, whose gradients are reduced over data-parallel ranks.
        layout: Their names.
        runtime: All ranks.

    Raises:
        ShardingError: A gradient differs.
    """
    if runtime.mesh.tensor_parallel == 1:
        return
    peers = runtime.along("tensor_parallel")
    ranks = set(runtime.mesh.peers(runtime.rank, ("tensor_parallel",)))
    unplanned = [p for p in parameters if _is_same_on_peers(p, ranks)]
    apart = [_distance(p, peers).to(runtime.device) for p in unplanned]  # offloaded ones are in host memory
    if not apart:
        return
    worst = runtime.all_reduce(torch.stack(apart), "max").tolist()
    names = [layout[p][0].name for p, by in zip(unplanned, worst, strict=True) if by > TOLERANCE]  # type: ignore[index]
    if names:
        told = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ShardingError(
            f"the gradients of {told} differ between tensor-parallel ranks, each of which would train its own copy: "
            "tp_plan does not name the module, and it sees only its rank's part of what a divided layer returns.\n"
            "Give it a style that sums its gradients, such as SequenceParallel(sequence_dim=2, use_local_output=True) "
            "for a norm of each head; or let the layer before it return the whole, with "
            "ColwiseParallel(output_layouts=Replicate())."
        )


def _is_same_on_peers(parameter: Tensor, peers: Collection[int]) -> bool:
    """Whether tensor-parallel ranks hold the same part of a trained parameter, on whatever mesh of theirs it is."""
    if not parameter.requires_grad:
        return False
    if not isinstance(parameter, DTensor):
        return True
    mesh, placements = parameter.device_mesh, parameter.placements
    return not any(ranks_along(mesh, i) == peers for i, one in enumerate(placements) if not one.is_replicate())


def _distance(parameter: Tensor, peers: Runtime) -> Tensor:
    """How far this rank's gradient is from its peers' mean, relative to the mean; 0 if it is not finite."""
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if local is None:
        local = torch.zeros_like(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    own = local.detach().float()
    mean = peers.all_reduce(own.clone(), "mean")
    distance = (own - mean).norm() / mean.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(distance, nan=0.0, posinf=0.0)
