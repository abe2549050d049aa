"""The option ``error_if_nonfinite``: stops before a step whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.errors import NonFiniteGradientError, UnsupportedCapabilityError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.gradients.finite import all_finite
from fsdp_core.gradients.step_gradients import plain
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.chunks import ChunkedTensor

__all__ = ["check_error_if_nonfinite", "refuse_nonfinite"]

_MAX_LISTED = 10


def check_error_if_nonfinite(value: object) -> None:
    """Refuse an ``error_if_nonfinite`` that is not a ``bool``.

    Raises:
        UnsupportedCapabilityError: The value is no ``bool``.
    """
    if not isinstance(value, bool):
        raise UnsupportedCapabilityError(
            f"error_if_nonfinite={value!r} is neither True nor False.\n"
            "Write True to stop before a step whose gradients hold NaN or infinity, or leave it out."
        )


def refuse_nonfinite(optimizer: Optimizer, roots: Sequence[Sharded], runtime: Runtime, step: str) -> None:
    """Raise on all ranks if a gradient is not finite on one of them. All ranks must call it.

    Args:
        optimizer: The optimizer that is about to step.
        roots: The sharded roots whose parameters it may hold.
        runtime: The ranks.
        step: Which step, in words, such as ``"step 3"``.

    Raises:
        NonFiniteGradientError: A gradient holds NaN or infinity.
    """
    optimizer_params = [p for group in optimizer.param_groups for p in group["params"]]
    if all_finite((p.grad for p in optimizer_params if p.grad is not None), runtime):
        return
    for root in roots:
        root.abandon_forward()  # in manual optimization a forward pass is running, and shows gathered parameters
        root.reshard()
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper around the user's
    layout = {p: parts for root in roots for p, parts in root.layout().items()}
    names_in_order = [part.name for p in optimizer_params for part in layout.get(p, ())]
    nonfinite_anywhere = runtime.all_reduce(
        torch.stack([_is_nonfinite(p, runtime.device) for p in optimizer_params]), "max"
    ).tolist()
    own_nonfinite_names: set[str] = set()
    for p, is_nonfinite in zip(optimizer_params, nonfinite_anywhere, strict=True):
        if is_nonfinite and p.grad is not None:  # is_nonfinite is the same on every rank, which _are_finite() needs
            # copied to the host as one tensor: on XLA, where ranks hold different pieces, they would compile different
            # programs otherwise
            gradient = p.grad if isinstance(p.grad, DTensor) else plain(p.grad).detach().cpu()
            own_nonfinite_names.update(part.name for part in layout.get(p, ()) if not _are_finite(part.of(gradient)))
    nonfinite_names = set().union(*runtime.gather_objects(own_nonfinite_names))
    names = [name for name in dict.fromkeys(names_in_order) if name in nonfinite_names]
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    listing = ", ".join(map(repr, names[:_MAX_LISTED])) + more
    count = f"{len(names)} parameter{'s' if len(names) != 1 else ''} of {type(optimizer).__name__}"
    raise NonFiniteGradientError(
        f"before {step}, the gradients of {count} hold NaN or infinity: {listing}.\n"
        "No rank has taken the step: weights and optimizer state are those of the step before, and can be saved. Look "
        "for the cause with torch.autograd.set_detect_anomaly(True), lower the learning rate, or skip the batch; leave "
        "error_if_nonfinite out to go on regardless."
    )


def _is_nonfinite(parameter: Tensor, device: torch.device) -> Tensor:
    """1 if this rank's gradient of a parameter holds NaN or infinity, else 0: as a tensor, which is not waited for."""
    if parameter.grad is None or not local_tensor(parameter.grad).numel():
        return torch.zeros((), device=device)
    return (~local_tensor(parameter.grad).detach().isfinite().all()).to(device, torch.float32)


def _are_finite(part: Tensor | ChunkedTensor) -> bool:
    tensors: Iterable[object] = [c.data for c in part.chunks] if isinstance(part, ChunkedTensor) else [part]
    return all(bool(local_tensor(tensor).isfinite().all()) for tensor in tensors if isinstance(tensor, Tensor))
