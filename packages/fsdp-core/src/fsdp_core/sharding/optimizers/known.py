"""What is known of optimizers without a trial."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["COMPUTES_HESSIAN", "ELEMENTWISE", "NEEDS_MATRICES", "REFUSED", "is_of_torch", "is_right_over_shards"]

#: Each element is updated by itself: right over any shards. Subclasses may do something else.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    }
)

#: By class name, those that a trial finds to look at whole matrices. A rehearsal has no values to try them on.
NEEDS_MATRICES = frozenset({"Muon"})

#: What is said of optimizers that need gradients with a graph.
COMPUTES_HESSIAN = (
    "differentiates gradients once more, and those of shards know nothing of how they were computed. Use another "
    "optimizer, such as AdamW."
)

#: Optimizers that need gradients which shards don't have, by class name: those of several libraries.
REFUSED = {
    "SparseAdam": "takes sparse gradients alone, and shards have dense ones. Use torch.optim.Adam, with "
    "nn.Embedding(sparse=False).",
    "Adahessian": COMPUTES_HESSIAN,
}


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's: their state can be saved, and none scales its steps by the loss.

    LBFGS looks at losses to stop early, which is right if users average them over ranks.
    """
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def is_right_over_shards(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> bool:
    """Whether it is known that steps over shards are steps over whole parameters.

    torch has fused steps over DTensors for some classes alone, and no step over lists of DTensors of several meshes.
    """
    if type(optimizer) not in ELEMENTWISE:
        return False
    meshes = {p.device_mesh for p in parameters if isinstance(p, DTensor)}
    return not meshes or (len(meshes) == 1 and not any(group.get("fused") for group in optimizer.param_groups))
