"""The user's own function that shards a module: what it is called with, and what it must return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core import ShardingError, UnsupportedCapabilityError

__all__ = ["ParallelizeFunction", "call_parallelize_fn", "check_parallelize_fn"]

#: Called with the module and the mesh, and with keyword arguments; returns the module.
ParallelizeFunction = Callable[..., nn.Module]


def check_parallelize_fn(function: object, options_given: Collection[str], arguments: Collection[str]) -> None:
    """Refuse a ``parallelize_fn`` that can't be called with a module and a mesh, or lacks an option that was given.

    Args:
        function: The option.
        options_given: The keyword arguments for those options that it replaces and that were given.
        arguments: The names of all keyword arguments that it may take.

    Raises:
        UnsupportedCapabilityError: It is no such function.
    """
    if function is None:
        return
    if not callable(function):
        raise UnsupportedCapabilityError(
            f"parallelize_fn={function!r} can't be called.\n"
            "Write a function: def parallelize(module, device_mesh, **options), which returns the module."
        )
    parameters = inspect.signature(function).parameters
    try:
        inspect.signature(function).bind(None, None, **dict.fromkeys(_accepted_names(parameters, arguments)))
    except TypeError as error:
        raise UnsupportedCapabilityError(
            f"parallelize_fn={_name(function)} can't be called with a module and a mesh: {error}.\n"
            f"Write it as def parallelize(module, device_mesh, **options); options are {', '.join(arguments)}."
        ) from error
    dropped = [name for name in options_given if name not in _accepted_names(parameters, options_given)]
    if dropped:
        names = ", ".join(dropped)
        were, them = ("was", "it") if len(dropped) == 1 else ("were", "them")
        raise UnsupportedCapabilityError(
            f"{names} {were} given, and parallelize_fn={_name(function)}, which replaces what would use {them}, does "
            f"not take {them}.\n"
            f"Add **options or {names} to its parameters, or leave {names} out."
        )


def call_parallelize_fn(
    function: ParallelizeFunction, module: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]
) -> None:
    """Let the user's function shard a module in place. All ranks must call it.

    Args:
        function: The function. It gets the keyword arguments that its signature names, or all if it has ``**``.
        module: The module, with the same values on every rank.
        mesh: The ranks.
        options: The keyword arguments.

    Raises:
        ShardingError: It returned something else than the module.
    """
    names = _accepted_names(inspect.signature(function).parameters, options)
    returned = function(module, mesh, **{name: options[name] for name in names})
    if returned is module:
        return
    description = "None" if returned is None else f"a {type(returned).__name__}"
    remedy = (
        "Replace submodules of the module that it gets, and return that module."
        if isinstance(returned, nn.Module)
        else "End it with `return module`."
    )
    raise ShardingError(
        f"parallelize_fn={_name(function)} returned {description} instead of the {type(module).__name__} that it was "
        f"given, which is what is trained.\n{remedy}"
    )


def _accepted_names(parameters: Mapping[str, inspect.Parameter], names: Collection[str]) -> list[str]:
    """The names that a signature takes as keyword arguments, beyond its first two."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(names)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = [parameter.name for parameter in list(parameters.values())[2:] if parameter.kind in by_keyword]
    return [name for name in names if name in keywords]


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
