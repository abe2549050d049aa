"""What a unit exchanges with its caller besides tensors: lists and dictionaries that it changes, objects it returns.

Libraries that gather for a unit's forward pass copy the containers that the unit is called with, to cast what is in
them or to put it into the autograd graph: what the unit then appends or sets is lost, without a word. And they find
the tensors that it returns only in containers that they know: for others they gather nothing in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_core.torch_private import tree_flatten

__all__ = ["UnitCalls"]


class UnitCalls:
    """Lets a unit's caller get what the unit puts into its arguments, and a library see all tensors that it returns.

    Its methods are hooks of the unit, in this order: :meth:`enter`, what the library does before the unit computes,
    :meth:`begin`, the unit, what the library does with its output, :meth:`leave`.

    Args:
        show: Called with the tensors that require gradients and leave the unit elsewhere than in its output, or in
            objects that the library doesn't look into. It lets the library gather before their backward pass.
    """

    def __init__(self, show: Callable[[list[Tensor]], None]) -> None:
        self._show = show
        self._running: list[_Call | None] = []  # the innermost last

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitCalls:
        return UnitCalls(_nothing)  # of a copy, which is not sharded

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the caller's arguments. A forward pre-hook with keyword arguments."""
        given = [*args, *kwargs.values()]
        self._running.append(_Call(given) if any(map(_holds_container, given)) else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the library passes on. A forward pre-hook with keyword arguments."""
        if self._running and (call := self._running[-1]) is not None:
            call.begin([*args, *kwargs.values()])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Return to the caller. A forward hook that is called after an exception too."""
        call = self._running.pop() if self._running else None
        shown = [] if call is None else [one for one in tree_flatten(call.give_back())[0] if isinstance(one, Tensor)]
        if torch.is_grad_enabled():
            if not isinstance(output, Tensor):
                shown += _hidden_tensors(output, 3)
            if shown := [one for one in shown if one.requires_grad]:
                self._show(shown)


def _nothing(shown: list[Tensor]) -> None:
    pass


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

    def give_back(self) -> list[Any]:
        """Put what the unit has put into its containers into those of the caller.

        Returns:
            What the caller did not have.
        """
        new: list[Any] = []
        for one in self._copied:
            after = _items(one.passed)
            if [(key, id(value)) for key, value in after] != [(key, id(value)) for key, value in one.before]:
                new += [value for _, value in after if id(value) not in self._given_for]
                if one.given is not one.passed:
                    _put(one.given, [(key, self._given_for.get(id(value), value)) for key, value in after])
        return new


def _put(container: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(container, dict):
        kept = dict(items)
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key, value in items:
            container[key] = value
    elif isinstance(container, list | deque):
        container.clear()
        container.extend(value for _, value in items)
    else:
        vars(container).update(items)


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
    """The tensors in the objects of an output that are no containers, such as a distribution."""
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
            yield one
        else:
            yield from _hidden_tensors(one, depth - 1)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
