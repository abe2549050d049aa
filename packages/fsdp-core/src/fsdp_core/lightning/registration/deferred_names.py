"""A registry that is filled when it is first read, so that importing Lightning loads no plugin."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["fill_when_read"]

_READING_METHODS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__reduce_ex__", "__repr__", "__reversed__", "__ror__", "__str__", "available_strategies", "clear", "copy"),
    *("get", "items", "keys", "pop", "popitem", "remove", "setdefault", "update", "values"),
)


def fill_when_read(
    registry: Any, find: Callable[[], object], fill: Callable[[], None], never: frozenset[str] = frozenset()
) -> None:
    """Call ``find`` and ``fill`` right before ``registry`` is read for the first time.

    Until then the registry is an instance of a subclass, whose methods do that and restore the class. Registering does
    not count as reading: Lightning registers further names after its strategies module has run.

    Args:
        registry: An instance of a subclass of ``dict``.
        find: Finds the entries, which may take long: other threads that read meanwhile do so too.
        fill: Registers them.
        never: Names that are never registered, which Lightning may look up while it is imported.

    Example:
        >>> class Registry(dict):
        ...     pass
        >>> registry = Registry(a=1)
        >>> fill_when_read(registry, lambda: None, lambda: registry.update(b=2))
        >>> "b" in registry, type(registry) is Registry
        (True, True)
    """
    own_class = type(registry)

    def make_filling_method(name: str) -> Callable[..., Any]:
        """Make a method of ``deferred_class`` that fills the registry, and then calls the method of its own class."""

        @wraps(getattr(own_class, name))
        def fill_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "__contains__" and args[0] in never:
                return dict.__contains__(self, args[0])
            is_copy = self is not registry
            if is_copy:
                self.__class__ = own_class
            elif type(self) is deferred_class:
                find()
                if type(self) is deferred_class:  # else another thread has filled the registry meanwhile
                    self.__class__ = own_class
                    fill()
            return getattr(self, name)(*args, **kwargs)

        return fill_and_call

    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = own_class
        try:
            return self.register(*args, **kwargs)
        finally:
            self.__class__ = deferred_class

    methods: dict[str, Any] = {name: make_filling_method(name) for name in _READING_METHODS if hasattr(own_class, name)}
    if hasattr(own_class, "register"):
        methods["register"] = register
    deferred_class = type(own_class.__name__, (own_class,), {"__module__": own_class.__module__, **methods})
    registry.__class__ = deferred_class
