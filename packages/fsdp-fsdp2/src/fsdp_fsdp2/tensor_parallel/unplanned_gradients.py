"""Gradients that must be the same on tensor-parallel ranks, because the plan does not divide their parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdp_core import Runtime, ShardingError
from fsdp_core.state import Layout
from fsdp_fsdp2.meshes import ranks_along

__all__ = ["check_unplanned"]

#: How far a rank's gradient may be from the mean of its peers', relative to the mean's norm. Peers compute the same
#: from the same batch, up to the order of sums in some kernels; where each sees another part, they differ by about 1.
TOLERANCE = 0.05

#: The length of a sketch, by which ranks compare a gradient: a sum of its pieces of this length, with random signs. The
#: norm of a sketch, and of a difference of two, is that of the gradients up to (2 · _SKETCH) ** -0.5 = 6 %.
_SKETCH = 128

#: After how many elements the random signs repeat: a prime, so that no two rows of a matrix get the same signs.
_PERIOD = 65_521

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
    is_along_peers = cache(lambda mesh, axis: ranks_along(mesh, axis) == ranks)
    unplanned = [p for p in parameters if p.requires_grad and not _is_divided(p, is_along_peers)]
    if not unplanned:
        return
    own_sketches = torch.stack([_sketch(p).to(runtime.device) for p in unplanned])  # offloaded ones are on the host
    mean = peers.all_reduce(own_sketches.clone(), "mean")
    distances, norms = (own_sketches - mean).norm(dim=1), mean.norm(dim=1)
    relative = distances / norms.clamp_min(max(float(norms.norm()) * NEGLIGIBLE, torch.finfo(torch.float32).tiny))
    # a gradient that is not finite is not compared: it is no fault of the plan
    worst = runtime.all_reduce(torch.nan_to_num(relative, nan=0.0, posinf=0.0), "max").tolist()
    names = [
        layout[parameter][0].name  # type: ignore[index]
        for parameter, distance in zip(unplanned, worst, strict=True)
        if distance > TOLERANCE
    ]
    if names:
        listing = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        differ = (
            f"the gradients of {listing} differ between tensor-parallel ranks, each of which would train its own copy"
        )
        digests = peers.gather_objects(_digest_generators(runtime))
        if any(runtime.gather_objects(len(set(digests)) > 1)):
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


def _is_divided(parameter: Tensor, is_along_peers: Callable[[DeviceMesh, int], bool]) -> bool:
    """Whether tensor-parallel ranks hold different parts of a parameter, whose mesh may be the user's own."""
    if not isinstance(parameter, DTensor):
        return False
    mesh, placements = parameter.device_mesh, parameter.placements
    return any(is_along_peers(mesh, i) for i, placement in enumerate(placements) if not placement.is_replicate())


def _sketch(parameter: Tensor) -> Tensor:
    """A sketch of this rank's part of a parameter's gradient, with signs that are the same on all ranks."""
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if local is None:
        return torch.zeros(_SKETCH, device=parameter.device)
    signs = _signs(local.device).repeat(-(-local.numel() // _PERIOD))[: local.numel()]
    signed = local.detach().float().flatten() * signs
    return pad(signed, (0, -signed.numel() % _SKETCH)).view(-1, _SKETCH).sum(0)


@cache
def _signs(device: torch.device) -> Tensor:
    drawn = torch.randint(2, (_PERIOD,), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    return drawn.mul_(2).sub_(1).to(device)


def _digest_generators(runtime: Runtime) -> str:
    """A digest of the states of torch's generators, from which dropout draws."""
    on_device = runtime.device_random_state()
    states = [torch.get_rng_state(), *([] if on_device is None else [on_device])]
    return hashlib.sha256(b"".join(bytes(state.cpu().tolist()) for state in states)).hexdigest()
