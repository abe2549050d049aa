"""Public names of a package, each imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package (:pep:`562`).

    Args:
        package: The package's ``__name__``.
        homes: Its public names, with the module that each is imported from.

    Returns:
        Both functions. ``__getattr__`` raises :exc:`AttributeError` for a name that is not in ``homes``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(modules[package]), *homes})

    return get, names
