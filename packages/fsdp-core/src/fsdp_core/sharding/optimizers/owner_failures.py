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

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class OwnerFailure:
    """Why a rank has no weights to return. It still takes part in the exchanges, so that no rank waits for it.

    Attributes:
        said: What happened, for all ranks.
        error: The exception, if there was one.
    """

    said: str
    error: Exception | None = None


def failed_in(error: Exception, owned: Sequence[tuple[str, Tensor, Tensor | None]]) -> OwnerFailure:
    """The failure of an optimizer's step, with the parameter that it was at.

    Optimizers don't say which. It is one that a local variable was bound to, in the innermost function that has such
    variables, as it raised; if there is none, any of those that the rank owns.

    Args:
        error: What the step has raised.
        owned: The parameters that it steps over, by name, with their gradients.

    Example:
        >>> import torch
        >>> weight, other = torch.ones(2, 2), torch.ones(2)
        >>> def step(p):
        ...     return torch.linalg.inv(p - p)
        >>> try:
        ...     _ = step(weight)
        ... except Exception as error:
        ...     print(failed_in(error, [("bias", other, None), ("weight", weight, None)]).said[:46])
        while it updated 'weight': _LinAlgError: linal
    """
    names = {id(tensor): name for name, *tensors in owned for tensor in tensors if tensor is not None}
    at: list[str] = []
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not at:
            at = list(dict.fromkeys(names[id(value)] for value in frame.f_locals.values() if id(value) in names))
    at = at or list(dict.fromkeys(names.values()))
    more = f" and {len(at) - _SHOWN} more" if len(at) > _SHOWN else ""
    which = ("" if len(at) == 1 else "one of ") + ", ".join(map(repr, at[:_SHOWN])) + more
    return OwnerFailure(said=f"while it updated {which}: {type(error).__name__}: {error}", error=error)


def raise_together(runtime: Runtime, optimizer: str, failure: OwnerFailure | None) -> NoReturn:
    """Raise what one rank, or several, have failed with. All ranks call it.

    Args:
        runtime: The ranks.
        optimizer: The optimizer's class name.
        failure: This rank's.

    Raises:
        ShardingError: Always.
    """
    said = runtime.gather_objects(None if failure is None else failure.said)
    rank, first = next((rank, one) for rank, one in enumerate(said) if one is not None)
    others = [str(other) for other, one in enumerate(said) if one is not None and other != rank]
    also = f" Rank {', '.join(others)} has failed as well." if others else ""
    raise ShardingError(
        f"{optimizer} has failed on rank {rank}, {first}.{also}\n"
        "No weight was changed in this step, but on some ranks its state was: go on from a checkpoint."
    ) from (None if failure is None else failure.error)
