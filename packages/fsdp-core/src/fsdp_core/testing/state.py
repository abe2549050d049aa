"""Shards on a rank and the full state: how the suite inspects shards without knowing a library's layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.full_tensor import gather_each
from fsdp_core.testing.launching.rank_context import rank_context

__all__ = [
    "assert_sharded",
    "copied_state",
    "count_local_elements",
    "full_optimizer_state",
    "full_state",
    "local",
    "poison_gradient",
    "sharded_by",
    "trained_by",
]


def sharded_by(strategy: Any) -> Sharded:
    """The :class:`~fsdp_core.Sharded` of the only module that a strategy has sharded.

    Args:
        strategy: The strategy of a Trainer that is running, or of a Fabric that has set up one module.
    """
    (sharded,) = strategy.roots if hasattr(strategy, "roots") else [strategy.sharded]
    assert isinstance(sharded, Sharded)
    return sharded


def full_state(strategy: Any, sharded: Sharded | None = None) -> dict[str, Any]:
    """The full state of a root by name, copied to host memory, on every rank. All ranks must call it.

    Args:
        strategy: The strategy of a Trainer or Fabric.
        sharded: A sharded root; the only one when ``None``.
    """
    state = (sharded_by(strategy) if sharded is None else sharded).model_state()
    gathered = gather_each(state, strategy.runtime)
    return {name: _host_copy(value) for name, value in gathered}


def full_optimizer_state(strategy: Any, optimizer: Any, sharded: Sharded | None = None) -> dict[str, dict[str, Any]]:
    """The full state of an optimizer by parameter name, in host memory, on every rank. All ranks must call it.

    Args:
        strategy: The strategy of a Trainer or Fabric.
        optimizer: The user's optimizer, or Lightning's wrapper around it.
        sharded: The root that it trains; the only one when ``None``.
    """
    inner_optimizer = getattr(optimizer, "_optimizer", optimizer)
    state = (sharded_by(strategy) if sharded is None else sharded).optimizer_state(inner_optimizer)["state"]
    flat = {(name, key): state[name][key] for name in sorted(state) for key in sorted(state[name])}
    full: dict[str, dict[str, Any]] = {name: {} for name in sorted(state)}
    for (name, key), value in gather_each(flat, strategy.runtime):
        full[name][key] = _host_copy(value)
    return full


def _host_copy(value: Any) -> Any:
    """Copy a tensor to the host: a process can't open device memory of another one that has ended."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def copied_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the state of a module that is not sharded yet."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing memory with it."""
    return rank_context().local(tensor)


def count_local_elements(parameters: Iterable[Tensor]) -> int:
    """Count the elements of some parameters that this rank holds."""
    return sum(map(rank_context().local_numel, parameters))


def trained_by(optimizer: Any) -> list[nn.Parameter]:
    """The parameters of all param groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_sharded(local_counts: Sequence[int], total: int) -> None:
    """Assert that every rank holds about its share, and that together they hold everything.

    Args:
        local_counts: The number of elements that each rank holds, by rank; see :func:`count_local_elements`.
        total: The number of elements of the unsharded model.

    Example:
        >>> assert_sharded([5, 4], 9)
        >>> assert_sharded([9, 9], 9)
        Traceback (most recent call last):
            ...
        AssertionError: of 9 elements, the ranks hold [9, 9]...
    """
    # Shares are uneven if sizes don't divide evenly, and 0-dim parameters may be on every rank.
    max_share = int(1.3 * total / len(local_counts))
    message = f"of {total} elements, the ranks hold {local_counts}"
    assert max(local_counts) <= max_share, f"{message}: each may hold {max_share} at most"
    assert sum(local_counts) >= total, message


def poison_gradient(parameters: Iterable[nn.Parameter], value: float, *, on_this_rank: bool) -> None:
    """Add infinity or NaN to one gradient element on one rank only. All ranks must call it.

    The other ranks add zero: the graph that a library compiles must be the same on all ranks.

    Args:
        parameters: Sharded parameters with gradients, of which this rank holds some elements.
        value: Infinity or NaN, to be added.
        on_this_rank: Whether to add it on this rank.
    """
    for parameter in parameters:
        if parameter.grad is not None and local(parameter.grad).numel():
            local_grad = local(parameter.grad)
            added = torch.zeros(local_grad.shape, dtype=local_grad.dtype)
            if on_this_rank:
                added.view(-1)[0] = value
            with torch.no_grad():
                local_grad.add_(added.to(local_grad.device))
            return
    assert not on_this_rank, "this rank holds no gradient"
