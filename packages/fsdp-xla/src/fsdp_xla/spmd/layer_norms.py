"""Layer norms that XLA's partitioner can shard along the batch.

torch records layer norms for XLA as batch norms, for which the partitioner gathers all activations on every device.
The operator is replaced by arithmetic for the whole process, which uses SPMD until it ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cut_layer_norms"]


def cut_layer_norms() -> None:
    """Record layer norms on XLA devices as plain arithmetic, from now on in this process.

    torch records them for XLA as a batch norm of one row per example, which the partitioner doesn't shard: every device
    gathers all activations, forward and backward, and computes every norm.
    """
    if not _library:
        library = torch.library.Library("aten", "IMPL")
        library.impl("native_layer_norm", _layer_norm, "AutogradXLA", allow_override=True)
        _library.append(library)


#: The replacement is active as long as the library is alive.
_library: list[torch.library.Library] = []


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    promoted = x.to(torch.promote_types(x.dtype, torch.float32))  # rounded once at the end, as in torch's own
    mean = promoted.mean(dims, keepdim=True)
    centred = promoted - mean
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    normalized = centred * scale
    if weight is not None:
        normalized = normalized * weight
    if bias is not None:
        normalized = normalized + bias
    return normalized.to(x.dtype), mean, scale
