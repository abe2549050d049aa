"""Hooks on gradients of parameters that are shards: called with the reduced gradient, or refused when registered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["refuse_gradient_hooks"]

_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


def refuse_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]], called: Collection[str]) -> None:
    """Refuse hooks on shards that their library never calls, when they are registered.

    Args:
        parameters: The shards, with the user's names.
        called: The names of the methods whose hooks the library calls with reduced gradients.

    Example:
        >>> import torch
        >>> shard = nn.Parameter(torch.ones(2))
        >>> refuse_gradient_hooks([("weight", shard)], ["register_post_accumulate_grad_hook"])
        >>> shard.register_hook(print)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.UnsupportedCapabilityError: register_hook() of 'weight', which is sharded: ...
    """
    for name, parameter in parameters:
        for method in _METHODS:
            if method not in called:
                instance: Any = parameter
                setattr(instance, method, partial(_refuse, method, name, tuple(called)))


def _refuse(method: str, name: str, called: tuple[str, ...], hook: Callable[..., Any]) -> NoReturn:
    instead = (
        f"Write parameter.{called[0]}(hook), whose hook gets the parameter with its reduced gradient in parameter.grad."
        if called
        else "Read gradients in on_before_optimizer_step(), or under Fabric after fabric.backward()."
    )
    raise UnsupportedCapabilityError(
        f"{method}() of {name!r}, which is sharded: its gradient is reduced to the shard without a call of the hook.\n"
        f"{instead}"
    )
