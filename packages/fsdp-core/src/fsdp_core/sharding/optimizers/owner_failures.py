"""Failures of one owner's step, which all ranks raise together: the others wait for its weights."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = ["OwnerFailure", "failed_in", "raise_together"]

_MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class OwnerFailure:
    """Why a rank has no weights to return. It still takes part in the exchanges, so that no rank waits for it.

    Attributes:
        message: What happened, for all ranks.
        error: The exception, if there was one.
    """

    message: str
    error: Exception | None = None


def failed_in(error: Exception, parameters: Sequence[tuple[str, Tensor, Tensor | None]]) -> OwnerFailure:
    """The failure of an optimizer's step, with the parameter that it was updating.

    Optimizers don't say which. It is looked up among the local variables of the functions in the traceback, the
    innermost function first. If none has a parameter there, all parameters that the rank owns are named.

    Args:
        error: What the step has raised.
        parameters: Those that it steps over, by name, with their gradients.

    Example:
        >>> import torch
        >>> weight, other = torch.ones(2, 2), torch.ones(2)
        >>> def step(p):
        ...     return torch.linalg.inv(p - p)
        >>> try:
        ...     _ = step(weight)
        ... except Exception as error:
        ...     print(failed_in(error, [("bias", other, None), ("weight", weight, None)]).message[:46])
        while it updated 'weight': _LinAlgError: linal
    """
    names: dict[int, str] = {}
    for name, *tensors in parameters:
        names.update((id(tensor), name) for tensor in tensors if tensor is not None)
    candidates = list(dict.fromkeys(names.values()))
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        names_in_frame = [names[id(value)] for value in frame.f_locals.values() if id(value) in names]
        if names_in_frame:
            candidates = list(dict.fromkeys(names_in_frame))
            break
    listing = ", ".join(map(repr, candidates[:_MAX_NAMES]))
    if len(candidates) > 1:
        listing = f"one of {listing}"
    if len(candidates) > _MAX_NAMES:
        listing += f" and {len(candidates) - _MAX_NAMES} more"
    return OwnerFailure(message=f"while it updated {listing}: {type(error).__name__}: {error}", error=error)


def raise_together(runtime: Runtime, optimizer: str, failure: OwnerFailure | None) -> NoReturn:
    """Raise what one rank, or several, have failed with. All ranks call it.

    Args:
        runtime: The ranks.
        optimizer: The optimizer's class name.
        failure: This rank's.

    Raises:
        ShardingError: Always.
    """
    messages = runtime.gather_objects(None if failure is None else failure.message)
    rank, first = next((rank, text) for rank, text in enumerate(messages) if text is not None)
    further_ranks = [str(other) for other, text in enumerate(messages) if text is not None and other != rank]
    also = f" Rank {', '.join(further_ranks)} has failed as well." if further_ranks else ""
    raise ShardingError(
        f"{optimizer} has failed on rank {rank}, {first}.{also}\n"
        "No weight was changed in this step, but on some ranks its state was: go on from a checkpoint."
    ) from (None if failure is None else failure.error)
