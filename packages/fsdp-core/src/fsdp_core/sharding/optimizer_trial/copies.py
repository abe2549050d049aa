"""Copies of optimizers, whose parameters small tensors stand for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.torch_private import plain_tensors_replicated

__all__ = ["Step", "copied", "keeps_parameters", "requires_closure", "step_of", "takes_closure"]

#: The minimum learning rate of a trial: with a schedule that starts at 0, no difference would be visible.
_RATE = 1e-2

#: Steps once. What it gets computes the loss and gradients.
Step = Callable[[Callable[[], Tensor]], Any]


def copied(optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Copy an optimizer, with its parameters replaced everywhere, without its hooks.

    Args:
        optimizer: The optimizer. It is not changed.
        stand_ins: What replaces its parameters, by the id of the parameter.
    """
    made: Any = object.__new__(type(optimizer))
    state: dict[Tensor, Any] = {
        stand_ins[id(p)]: {key: _small_state(value, p, stand_ins[id(p)]) for key, value in values.items()}
        for p, values in optimizer.state.items()
        if id(p) in stand_ins
    }
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    kept = {name: type(value)() if name.endswith("_hooks") else value for name, value in kept.items()}
    vars(made).update(copy.deepcopy(kept, {**stand_ins, id(optimizer): made}))
    if "state" in vars(optimizer):  # otherwise the state is an inner optimizer's
        made.state = type(optimizer.state)(dict, state)  # a defaultdict
    for group in made.param_groups:
        group["params"][:] = dict.fromkeys(group["params"])  # in place, because other objects may hold the list
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], _RATE)
    train = getattr(made, "train", None)
    if callable(train):
        train()  # schedule-free optimizers need it
    return made  # type: ignore[no-any-return]


def step_of(optimizer: Any, *, by_closure: bool) -> Step:
    """How an optimizer steps: with a closure, or over the gradients that are there."""

    def step(evaluate: Callable[[], Any]) -> Any:
        with plain_tensors_replicated(optimizer) as as_outside:
            return optimizer.step(as_outside(evaluate)) if by_closure else optimizer.step()

    return step


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer says that it can't step without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer says that it can step with a closure."""
    return "closure" in inspect.signature(type(optimizer).step).parameters


def keeps_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds parameters in other places than its param groups."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = {id(optimizer.param_groups), *(id(group) for group in optimizer.param_groups)}

    def finds(value: Any) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            return value is not optimizer and any(finds(inner) for inner in vars(value).values())
        if id(value) in groups:
            return False
        if isinstance(value, dict):
            return any(finds(inner) for pair in value.items() for inner in pair)
        if isinstance(value, list | tuple | set | frozenset):
            return any(map(finds, value))
        return id(value) in held

    return any(finds(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state"))


def _small_state(value: Any, parameter: Tensor, stand_in: Tensor) -> Any:
    """A value of the state that an optimizer creates before its first step, converted for a small tensor."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        local = value.to_local() if isinstance(value, DTensor) else value
        fill = local.reshape(-1)[0].item() if local.numel() else 0.0
        return torch.full_like(stand_in.detach(), fill, dtype=value.dtype)
    return copy.deepcopy(value)
