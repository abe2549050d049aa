"""Replaces functions of Lightning by wrappers, in place and once each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["mark_wrapper", "replace_function"]


def replace_function(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function by ``wrap(function)``, if ``owner`` itself defines it and it is not wrapped yet."""
    function = None if owner is None else vars(owner).get(name)
    if not inspect.isfunction(function) or getattr(function, "_fsdp_core_wrapped_by", None) is wrap:
        return
    # Lightning's module may have imported a function that another wrapper has replaced: what that wraps is wrapped.
    setattr(owner, name, wrap(getattr(function, "_fsdp_core_wraps", function)))


def mark_wrapper(wrapper: Any, wrapped: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Record on a wrapper what it wraps, and what created it."""
    wrapper._fsdp_core_wraps = wrapped
    wrapper._fsdp_core_wrapped_by = wrap
    marked: Callable[..., Any] = wrapper
    return marked
