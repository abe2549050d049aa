"""What a unit exchanges with its caller besides tensors: lists and dictionaries that it changes, objects it returns.

Libraries that gather for a unit's forward pass copy the containers that the unit is called with, to cast what is in them
or to put it into the autograd graph: what the unit then appends or sets is lost, without a word. And they find the
tensors that it returns only in containers that they know: for others they gather nothing in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["UnitCalls"]


class UnitCalls:
    """Lets a unit's caller get what the unit puts into its arguments, and a library see all tensors that it returns.

    Its methods are hooks of the unit, in this order: :meth:`enter`, what the library does before the unit computes,
    :meth:`begin`, the unit, :meth:`end`, what the library does with its output, :meth:`leave`.
    """

    def __init__(self) -> None:
        self._running: list[_Call | None] = []  # the innermost last

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitCalls:
        return UnitCalls()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the caller's arguments. A forward pre-hook with keyword arguments."""
        given = [*args, *kwargs.values()]
        self._running.append(_Call(given) if any(map(_holds_container, given)) else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the library passes on. A forward pre-hook with keyword arguments."""
        call = self._call()
        if call is not None:
            call.begin([*args, *kwargs.values()])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Show the library all tensors that leave the unit. A forward hook."""
        call = self._call()
        if call is None and isinstance(output, Tensor):
            return None
        changed = [] if call is None else call.changed()
        hidden = list(_hidden_tensors(output, 3)) if torch.is_grad_enabled() else []
        return _Shown(output, changed, hidden) if changed or hidden else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return to the caller. A forward hook that is called after an exception too."""
        call = self._running.pop() if self._running else None
        if call is not None:
            call.give_back(output.changed if isinstance(output, _Shown) else [])
        return output.output if isinstance(output, _Shown) else None

    def _call(self) -> _Call | None:
        return self._running[-1] if self._running else None


class _Shown(NamedTuple):
    """What a library gets for a unit's output, to handle all tensors in it: those of the output, and others."""

    output: Any
    changed: list[Any]
    hidden: list[Tensor]


class _Copied(NamedTuple):
    """A container that the caller has passed, and what the library has made of it: the same, or a copy."""

    given: Any
    passed: Any
    before: list[tuple[Any, Any]]


class _Call:
    """The containers of one call.

    Args:
        given: The arguments that the caller has passed.
    """

    def __init__(self, given: list[Any]) -> None:
        self._given, self._copied = given, list[_Copied]()
        self._given_for: dict[int, Any] = {}
        self._changes: list[tuple[_Copied, list[tuple[Any, Any]]]] = []
        self._new: dict[int, int] = {}

    def begin(self, passed: list[Any]) -> None:
        """Compare with the arguments that the library passes on, before the unit computes."""
        for given, one in zip(self._given, passed, strict=False):
            self._pair(given, one)

    def _pair(self, given: Any, passed: Any) -> None:
        self._given_for[id(passed)] = given
        if type(given) is not type(passed) or not _is_container(given):
            return
        before = _items(passed)
        if not isinstance(given, tuple):
            self._copied.append(_Copied(given, passed, before))
        for (_, one), (_, other) in zip(_items(given), before, strict=False):
            self._pair(one, other)

    def changed(self) -> list[Any]:
        """What the unit has put into containers that the caller does not have."""
        new: list[Any] = []
        for one in self._copied:
            after = _items(one.passed)
            if [(key, id(value)) for key, value in after] != [(key, id(value)) for key, value in one.before]:
                self._changes.append((one, after))
                new += [value for _, value in after if id(value) not in self._given_for]
        self._new = {id(value): index for index, value in enumerate(new)}
        return new

    def give_back(self, new: list[Any]) -> None:
        """Put it into the caller's containers.

        Args:
            new: What :meth:`changed` has returned, after the library has handled it.
        """
        for one, after in self._changes:
            items = [(k, self._given_for[id(v)] if id(v) in self._given_for else new[self._new[id(v)]]) for k, v in after]
            if isinstance(one.given, dict):
                kept = dict(items)
                for key in [key for key in one.given if key not in kept]:
                    del one.given[key]
                for key, value in items:
                    one.given[key] = value
            elif isinstance(one.given, list | deque):
                one.given.clear()
                one.given.extend(value for _, value in items)
            else:
                vars(one.given).update(items)


def _is_container(value: Any) -> bool:
    """Whether a library may copy it, with what is in it."""
    return isinstance(value, list | tuple | dict | deque) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    )


def _holds_container(value: Any) -> bool:
    """Whether it is a container that a unit can change, or holds one."""
    return any(map(_holds_container, value)) if isinstance(value, tuple) else _is_container(value)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, list | tuple | deque):
        return list(enumerate(container))
    return list(vars(container).items())


def _hidden_tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in the objects of an output that are no containers, such as a distribution."""
    if isinstance(value, Tensor | nn.Module | type | str | bytes | int | float | None) or depth < 0 or callable(value):
        return
    if _is_container(value):
        for _, one in _items(value):
            yield from _hidden_tensors(one, depth)
        return
    slots = (name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ())))
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for one in held:
        if isinstance(one, Tensor):
            if one.requires_grad:
                yield one
        else:
            yield from _hidden_tensors(one, depth - 1)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
