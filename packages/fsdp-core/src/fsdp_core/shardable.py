"""What no backend can shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_core.errors import ShardingError
from fsdp_core.torch_private import hooks_on

__all__ = ["check_shardable"]


def check_shardable(module: nn.Module, owner_of: Callable[[nn.Module], Any]) -> None:
    """Refuse a module that no backend can shard.

    Args:
        module: The root, before it is sharded.
        owner_of: What has sharded a module, or ``None``.

    Raises:
        ShardingError: It has no parameters, a part of it is sharded already, or a parameter has a gradient hook.

    Example:
        >>> check_shardable(nn.Linear(2, 1), lambda module: None)
        >>> check_shardable(nn.ReLU(), lambda module: None)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: ReLU has no parameters, so there is nothing to shard.
        Build its layers in __init__ or configure_model, or use strategy='ddp'.
    """
    name = type(module).__name__
    if not any(True for _ in module.parameters()):
        raise ShardingError(
            f"{name} has no parameters, so there is nothing to shard.\n"
            "Build its layers in __init__ or configure_model, or use strategy='ddp'."
        )
    for fqn, submodule in module.named_modules():
        if submodule is not module and owner_of(submodule) is not None:
            raise ShardingError(
                f"{fqn!r} inside {name} was set up and sharded before, by itself.\n"
                "Set up the whole model, and not its parts."
            )
    for fqn, parameter in module.named_parameters():
        if hooks_on(parameter):
            raise ShardingError(
                f"parameter {fqn!r} has a gradient hook, which would never run: sharding replaces the parameter.\n"
                "Register it after the set-up with register_post_accumulate_grad_hook, on the sharded gradient."
            )
