"""Gradients that tensor-parallel ranks should have alike, because the plan does not divide their parameters."""

from __future__ import annotations

import hashlib
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

#: The share of the norm of all these gradients below which one is taken for rounding, such as that of a bias that moves
#: all scores of a softmax alike, whose gradient would be 0.
NEGLIGIBLE = 1e-6


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
    if not unplanned:
        return
    apart = [torch.stack(_distance(p, peers)).to(runtime.device) for p in unplanned]  # offloaded ones are on the host
    distances, norms = torch.stack(apart).unbind(1)
    relative = distances / norms.clamp_min(max(float(norms.norm()) * NEGLIGIBLE, torch.finfo(torch.float32).tiny))
    worst = runtime.all_reduce(torch.nan_to_num(relative, nan=0.0, posinf=0.0), "max").tolist()
    names = [layout[p][0].name for p, by in zip(unplanned, worst, strict=True) if by > TOLERANCE]  # type: ignore[index]
    if names:
        told = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        differ = f"the gradients of {told} differ between tensor-parallel ranks, each of which would train its own copy"
        states = peers.gather_objects(_generators(runtime))
        if any(runtime.gather_objects(states != states[:1] * len(states))):
            raise ShardingError(
                f"{differ}, and so do their random generators: a rank has drawn numbers that the others have not, so "
                "dropout leaves out other elements on each.\n"
                "Draw on all ranks or on none, as in a branch for rank 0 alone; or draw from a generator of its own, "
                "such as torch.Generator() or numpy.random.default_rng()."
            )
        raise ShardingError(
            f"{differ}: tp_plan does not name the module, and it sees only its rank's part of what a divided layer "
            "returns.\n"
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


def _distance(parameter: Tensor, peers: Runtime) -> tuple[Tensor, Tensor]:
    """How far this rank's gradient is from its peers' mean, and the mean's norm."""
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if local is None:
        local = torch.zeros_like(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    own = local.detach().float()
    mean = peers.all_reduce(own.clone(), "mean")
    return (own - mean).norm(), mean.norm()


def _generators(runtime: Runtime) -> str:
    """A digest of the states of torch's generators, from which dropout draws."""
    on_device = runtime.device_random_state()
    states = [torch.get_rng_state(), *([] if on_device is None else [on_device])]
    return hashlib.sha256(b"".join(bytes(state.cpu().tolist()) for state in states)).hexdigest()
