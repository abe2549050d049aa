"""Functions of Lightning's that ours wrap: where they are, and once each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["marked", "replace_function"]


def replace_function(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what ``wrap`` makes of a function in its place, where ``owner`` itself has one that is not wrapped yet."""
    function = None if owner is None else vars(owner).get(name)
    if not inspect.isfunction(function) or getattr(function, "_fsdp_core_wrapped_by", None) is wrap:
        return
    # A module that was imported later has taken another's wrapper with it.
    setattr(owner, name, wrap(getattr(function, "_fsdp_core_wraps", function)))


def marked(wrapper: Callable[..., Any], wrapped: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Note on a wrapper what it is a wrapper of, and what has made it."""
    wrapper._fsdp_core_wraps, wrapper._fsdp_core_wrapped_by = wrapped, wrap  # type: ignore[attr-defined]
    return wrapper
