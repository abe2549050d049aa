"""Whether gradients are finite, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import Runtime

__all__ = ["all_finite"]


def all_finite(gradients: Iterable[Tensor], runtime: Runtime) -> bool:
    """Whether all elements of all ranks' gradients are finite. All ranks must call it.

    One number is reduced over the ranks, and read once.

    Args:
        gradients: This rank's gradients, or its shards of them; ranks may pass other ones.
        runtime: The ranks.

    Example:
        >>> from fsdp_core import ProcessGroupRuntime
        >>> runtime = ProcessGroupRuntime()
        >>> all_finite([torch.ones(2)], runtime), all_finite([torch.tensor([1.0, torch.nan])], runtime)
        (True, False)
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local_tensor, gradients):
        if gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient.detach().isfinite().all())
    nonfinite = torch.zeros((), device=runtime.device)
    for flags in by_device.values():
        nonfinite = nonfinite + (~torch.stack(flags).all()).to(runtime.device, nonfinite.dtype)
    return not bool(runtime.all_reduce(nonfinite, "max"))
