"""Copies of optimizers for a trial, and what a copy must know of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["copy_optimizer", "keeps_parameters", "nested_values", "requires_closure", "takes_closure"]

#: The smallest learning rate in a trial: with a schedule that starts at 0, no difference would be visible.
_LEAST_RATE = 1e-2


def copy_optimizer(optimizer: torch.optim.Optimizer, replacements: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Copy an optimizer, with its parameters replaced everywhere, without its hooks.

    Its constructor is not called, since its arguments are not known. ``copy.deepcopy`` alone would not do:
    ``Optimizer.__getstate__`` leaves out every attribute but the groups, the state and the defaults.

    Args:
        optimizer: The optimizer. It is not changed.
        replacements: What replaces its parameters, by the id of the parameter.
    """
    duplicate: Any = object.__new__(type(optimizer))
    attributes = {
        name: type(value)() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name not in ("step", "state")
    }
    vars(duplicate).update(copy.deepcopy(attributes, {**replacements, id(optimizer): duplicate}))
    if "state" in vars(optimizer):  # otherwise the state is an inner optimizer's
        state: dict[Tensor, Any] = {
            replacements[id(p)]: {key: _small_state(value, p, replacements[id(p)]) for key, value in values.items()}
            for p, values in optimizer.state.items()
            if id(p) in replacements
        }
        duplicate.state = type(optimizer.state)(dict, state)  # a defaultdict
    for group in duplicate.param_groups:
        group["params"][:] = dict.fromkeys(group["params"])  # in place, because other objects may hold the list
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], _LEAST_RATE)
    if callable(getattr(duplicate, "train", None)):
        duplicate.train()  # schedule-free optimizers need it
    return duplicate  # type: ignore[no-any-return]


def _small_state(value: Any, parameter: Tensor, replacement: Tensor) -> Any:
    """A value of the state that an optimizer creates before its first step, for a small parameter."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        local = value.to_local() if isinstance(value, DTensor) else value
        fill = local.reshape(-1)[0].item() if local.numel() else 0.0
        return torch.full_like(replacement.detach(), fill, dtype=value.dtype)
    return copy.deepcopy(value)


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer says that it can't step without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer says that it can step with a closure."""
    return "closure" in inspect.signature(type(optimizer).step).parameters


def nested_values(value: Any, skipped_ids: Collection[int] = ()) -> Iterator[Any]:
    """A value, and what is in it if it is a container, at any depth.

    Args:
        value: The value.
        skipped_ids: The ids of containers that are left out.
    """
    if id(value) in skipped_ids:
        return
    yield value
    members: Any = value.items() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple | set | frozenset):
        for member in members:
            yield from nested_values(member, skipped_ids)


def keeps_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or one inside it, keeps parameters elsewhere than in its param groups and its state."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    skipped = {id(optimizer), id(optimizer.param_groups), *map(id, optimizer.param_groups)}
    pending: list[Any] = [value for name, value in vars(optimizer).items() if name != "state"]
    while pending:
        for value in nested_values(pending.pop(), skipped):
            if id(value) in parameters:
                return True
            if isinstance(value, torch.optim.Optimizer) and id(value) not in skipped:
                skipped.add(id(value))
                pending += vars(value).values()
    return False
