"""Reads pickles as data: names in a pickle are recorded, and never imported, called or looked up."""

from __future__ import annotations

import io
import pickletools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.checkpoint.format.json_text import MAX_DIGITS
from fsdp_core.checkpoint.importing.memory_budget import MemoryBudget, current_budget
from fsdp_core.errors import CheckpointFormatError

__all__ = ["MAX_PICKLE_BYTES", "Name", "Named", "unpickle"]

MAX_PICKLE_BYTES = 2**28
"""The maximum size of a pickle; tensors are stored outside of it."""

_TOO_LARGE = 10**MAX_DIGITS  # Python could not even show it

# The modules that Python 2 had for what a pickle of protocol 2 still names so.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """A name that the pickle would import, such as ``collections.OrderedDict``."""

    name: str


@dataclass(eq=False, kw_only=True, slots=True)
class Named:
    """An object that the pickle would create by calling a name.

    Attributes:
        name: The name.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        state: The argument of ``__setstate__``.
        pairs: Items that would be set by key.
        items: Items that would be appended or added.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


def unpickle(data: bytes, where: str, on_persistent: Callable[[Any], Any] | None = None) -> Any:
    r"""Read a pickle without running any of its calls.

    Args:
        data: The pickle.
        where: The name of the pickle in errors.
        on_persistent: Resolves persistent ids, which :func:`torch.save` writes for storages.

    Returns:
        Dicts, lists, tuples, sets, numbers, strings and bytes as they are; a :class:`Name` for any other name, and a
        :class:`Named` for an object created from it.

    Raises:
        CheckpointFormatError: It is not a pickle, or not one that libraries write for checkpoints; or it would take
            more memory than the import may.

    Example:
        >>> call = unpickle(b"cposix\nsystem\n(S'rm -r /'\ntR.", "an example")
        >>> call.name, call.args
        ('posix.system', ('rm -r /',))
    """
    budget = current_budget()
    machine = _Machine(on_persistent, budget)
    try:
        budget.charge(len(data))
        for operation, argument in _operations(data, budget):
            machine.take(operation, argument)
        (result,) = machine.stack
    except CheckpointFormatError:
        raise
    except Exception as error:
        raise CheckpointFormatError(
            f"{where} can't be read as a pickle: {type(error).__name__}: {error}. Restore it from a backup."
        ) from error
    return result


_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MADE: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
_OF_MARKED: dict[str, Callable[[list[Any]], Any]] = {
    "LIST": list,
    "TUPLE": tuple,
    "FROZENSET": frozenset,
    "DICT": lambda items: dict(_in_pairs(items)),
}

# What is charged, in bytes, beside the size of an object itself: at most what CPython allocates.
_LONGEST_NAME = 1000
_MARK = 100
_SLOT = 26  # in a list that grows, and in the list that is made of what is on the stack
_ENTRY = 110  # of a dict that grows
_FIRST_ENTRY = 170
_ITEM = 100  # of a set that grows
_NAMED = 400  # an object of this module with its parts
_LONG = 2**16  # an argument that is worth a look before it is read
_TIMES_LONG = 5  # a text of which one character is not Latin takes four bytes for each


def _operations(data: bytes, budget: MemoryBudget) -> Iterator[tuple[str, Any]]:
    """Yield each operation with its argument, as :func:`pickletools.genops` does, but look at long ones before."""
    stream = io.BytesIO(data)
    while True:
        code = stream.read(1)
        operation = _OPERATIONS.get(code)
        if operation is None:
            what = f"an unknown operation {code!r}" if code else "no end"
            raise ValueError(f"it has {what} at byte {stream.tell()}")
        if operation.arg is None:
            yield operation.name, None
        else:
            at = stream.tell()
            if (length := min(_length(data, at, operation.arg), len(data) - at)) > _LONG:
                budget.require(_TIMES_LONG * length)
            yield operation.name, operation.arg.reader(stream)
        if operation.name == "STOP":
            return


def _length(data: bytes, at: int, argument: pickletools.ArgumentDescriptor) -> int:
    """How many bytes an argument takes that begins here; 0 for those of a few bytes."""
    if argument.n == pickletools.UP_TO_NEWLINE:
        end = at
        for _ in range(2 if argument.name.endswith("_pair") else 1):
            end = data.find(b"\n", end) + 1 or len(data)
        return end - at
    return int.from_bytes(data[at : at + _LENGTH_BYTES.get(argument.n, 0)], "little")


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


class _Machine:
    """The stack and the memo of a pickle. Supports only the operations that libraries write."""

    def __init__(self, on_persistent: Callable[[Any], Any] | None, budget: MemoryBudget) -> None:
        self._charge = budget.charge
        self.stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._on_persistent = on_persistent

    def take(self, operation: str, argument: Any) -> None:
        """Take one step."""
        if operation in _PUSHED:
            self._charge(sys.getsizeof(argument) + _SLOT)
            if type(argument) is int and abs(argument) >= _TOO_LARGE:
                raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
            self.stack.append(argument)
        elif operation in _CONSTANTS:
            self._charge(_SLOT)
            self.stack.append(_CONSTANTS[operation])
        elif operation in _MADE:
            self._push(_MADE[operation]())
        elif operation in _OF_MARKED:
            items = self._since_mark()  # which puts the stack before the mark in its place
            if operation == "FROZENSET":
                self._charge_for_hashes(items)
            elif operation == "DICT":
                self._charge_for_entries(items[::2])
            self._push(_OF_MARKED[operation](items))
        elif operation in ("GET", "BINGET", "LONG_BINGET"):
            self._charge(_SLOT)
            self.stack.append(self._memo[argument])
        elif operation in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._charge(_ENTRY + sys.getsizeof(argument))
            self._memo[argument] = self.stack[-1]
        else:
            step = getattr(self, f"_{operation.lower()}", None)
            if step is None:
                raise ValueError(f"{operation} has no place in a checkpoint")
            step(argument)

    def _push(self, value: Any) -> None:
        self._charge(sys.getsizeof(value) + _SLOT)
        self.stack.append(value)

    def _charge_for_entries(self, keys: list[Any]) -> None:
        """Charge for entries of a dict before they are made."""
        self._charge(_FIRST_ENTRY + _ENTRY * len(keys))
        self._charge_for_hashes(keys)

    def _charge_for_hashes(self, values: Iterable[Any]) -> None:
        """Charge for what is hashed: a tuple is hashed with all that it holds, as often as it holds it."""
        waiting = [value for value in values if type(value) is tuple]
        while waiting:
            held = waiting.pop()
            self._charge(_SLOT * (1 + len(held)))
            waiting += [value for value in held if type(value) is tuple]

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._marked.pop()
        return items

    def _proto(self, argument: Any) -> None:
        """Nothing: the protocol only says which operations follow."""

    _frame = _stop = _proto

    def _mark(self, argument: Any) -> None:
        self._charge(_MARK)
        self._marked.append(self.stack)
        self.stack = []

    def _pop_mark(self, argument: Any) -> None:
        self._since_mark()

    def _pop(self, argument: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _dup(self, argument: Any) -> None:
        self._charge(_SLOT)
        self.stack.append(self.stack[-1])

    def _memoize(self, argument: Any) -> None:
        self._charge(_ENTRY)
        self._memo[len(self._memo)] = self.stack[-1]

    def _tuple1(self, argument: Any) -> None:
        self._tuple(1)

    def _tuple2(self, argument: Any) -> None:
        self._tuple(2)

    def _tuple3(self, argument: Any) -> None:
        self._tuple(3)

    def _tuple(self, length: int) -> None:
        items = tuple(self.stack[-length:])
        if len(items) < length:
            raise IndexError("a tuple of more than there is")
        del self.stack[-length:]
        self._push(items)

    def _append(self, argument: Any) -> None:
        item = self.stack.pop()
        self._add([item], list)

    def _appends(self, argument: Any) -> None:
        self._add(self._since_mark(), list)

    def _additems(self, argument: Any) -> None:
        self._add(self._since_mark(), set)

    def _add(self, items: list[Any], kind: type) -> None:
        target = self.stack[-1]
        if isinstance(target, Named):
            target.items.extend(items)
        elif kind is list and type(target) is list:
            target.extend(items)
        elif kind is set and type(target) is set:
            self._charge(_ITEM * len(items))
            self._charge_for_hashes(items)
            target.update(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def _setitem(self, argument: Any) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set(items)

    def _setitems(self, argument: Any) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Named):
            self._charge(_ITEM * len(items))
            target.pairs.extend(_in_pairs(items))
        elif type(target) is dict:
            self._charge_for_entries(items[::2])
            target.update(_in_pairs(items))
        else:
            raise TypeError(f"keys for a {type(target).__name__}")

    def _global(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def _stack_global(self, argument: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not a string")
        if len(module) + len(name) > _LONGEST_NAME:
            raise ValueError(f"a name of more than {_LONGEST_NAME} characters")
        self._charge(_NAMED)
        self.stack.append(Name(name=f"{_OLD_MODULES.get(module, module)}.{name}"))

    def _reduce(self, argument: Any) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        self._call(called, args, {})

    _newobj = _reduce

    def _newobj_ex(self, argument: Any) -> None:
        kwargs, args, called = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._call(called, args, kwargs)

    def _call(self, called: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(called, Name) or type(args) is not tuple or type(kwargs) is not dict:
            raise TypeError("it calls something that is not a name")
        self._charge(_NAMED)
        self.stack.append(Named(name=called.name, args=args, kwargs=kwargs))

    def _build(self, argument: Any) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Named):
            raise TypeError(f"state for a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _persid(self, argument: Any) -> None:
        self.stack.append(argument)
        self._binpersid(argument)

    def _binpersid(self, argument: Any) -> None:
        if self._on_persistent is None:
            raise ValueError("it refers to something outside of itself")
        self._charge(_NAMED)
        self.stack.append(self._on_persistent(self.stack.pop()))


def _in_pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))
