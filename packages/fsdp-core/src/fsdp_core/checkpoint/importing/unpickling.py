"""Reads pickles as data: Python's unpickler gets a record for each name, and nothing is imported, looked up or run."""

from __future__ import annotations

import io
import pickletools
import sys
from collections.abc import Callable, Iterator
from pickle import Unpickler
from typing import Any

from fsdp_core.checkpoint.format.json_text import MAX_DIGITS
from fsdp_core.checkpoint.importing.memory_budget import MemoryBudget, current_budget
from fsdp_core.errors import CheckpointFormatError

__all__ = ["MAX_PICKLE_BYTES", "RecordedCall", "RecordedName", "unpickle"]

MAX_PICKLE_BYTES = 2**28
"""The maximum size of a pickle; tensors are stored outside of it."""

_MIN_REFUSED_INTEGER = 10**MAX_DIGITS  # Python does not write it in digits, so no message could show it

# The modules of Python 2 whose names pickles of protocol 2 still use.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class RecordedName(type):
    """A name that the pickle would import, such as ``collections.OrderedDict``: a class, which can be called.

    Attributes:
        name: The name.
    """

    name: str


class RecordedCall:
    """An object that the pickle would create by calling a name. Its class is the :class:`RecordedName`.

    Attributes:
        name: The name.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        state: The argument of ``__setstate__``.
        pairs: Items that would be set by key.
        items: Items that would be appended or added.
    """

    __slots__ = ("args", "items", "kwargs", "pairs", "state")

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    pairs: list[tuple[Any, Any]]
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> RecordedCall:
        """Record a call."""
        named = super().__new__(cls)
        named.args = args
        named.kwargs = kwargs
        named.state = None
        named.pairs = []
        named.items = []
        return named

    # What the unpickler calls:

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        """Record an item."""
        self.items.append(item)

    add = append


def unpickle(data: bytes, where: str, on_persistent: Callable[[Any], Any] | None = None) -> Any:
    r"""Read a pickle without running any of its calls.

    Args:
        data: The pickle.
        where: The name of the pickle in errors.
        on_persistent: Resolves persistent ids, which :func:`torch.save` writes for storages.

    Returns:
        Dicts, lists, tuples, sets, numbers, strings and bytes as they are; a :class:`RecordedName` for any other name,
        and a :class:`RecordedCall` for an object created from it.

    Raises:
        CheckpointFormatError: It is not a pickle, or not one that libraries write for checkpoints; or it would take
            more memory than the import may.

    Example:
        >>> call = unpickle(b"cposix\nsystem\n(S'rm -r /'\ntR.", "an example")
        >>> call.name, call.args
        ('posix.system', ('rm -r /',))
    """
    budget = current_budget()
    try:
        budget.charge(2 * len(data))
        _charge_operations(data, budget)
        return _RecordingUnpickler(data, on_persistent).load()
    except CheckpointFormatError:
        raise
    except Exception as error:
        raise CheckpointFormatError(
            f"{where} can't be read as a pickle: {type(error).__name__}: {error}. Restore it from a backup."
        ) from error


class _RecordingUnpickler(Unpickler):
    """Python's unpickler, for which every name is a record."""

    def __init__(self, data: bytes, on_persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._names: dict[str, RecordedName] = {}
        self._on_persistent = on_persistent

    def find_class(self, module: str, name: str) -> RecordedName:
        """Return a record of the name, the same one each time."""
        full_name = f"{_OLD_MODULES.get(module, module)}.{name}"
        if full_name not in self._names:
            if len(full_name) > _MAX_NAME_LENGTH:
                raise ValueError(f"a name of more than {_MAX_NAME_LENGTH} characters")
            self._names[full_name] = RecordedName("RecordedCall", (RecordedCall,), {"__slots__": (), "name": full_name})
        return self._names[full_name]

    def persistent_load(self, pid: Any) -> Any:
        """Return what a persistent id stands for."""
        if self._on_persistent is None:
            raise ValueError("it refers to something outside of itself")
        return self._on_persistent(pid)


# -- charging memory before anything is made ---------------------------------------------------------------------------

# What is charged, in bytes, beside the size of an object itself: CPython allocates no more.
_MAX_NAME_LENGTH = 1000
_MARK_BYTES = 100
_SLOT_BYTES = 26  # of a value on the stack, which is a list that grows, and in the list that is made from it
_CONTAINER_BYTES = 220  # an empty list, tuple, dict or set
_ENTRY_BYTES = 110  # of a dict that grows
_FIRST_ENTRY_BYTES = 170
_ITEM_BYTES = 100  # of a set that grows
_MEMO_BYTES = 16  # of the unpickler's memo, an array
_NAME_BYTES = 2000  # a class
_CALL_BYTES = 400  # an object of this module with its parts
_LONG_ARGUMENT = 2**16  # longer arguments are compared with the budget before they are read
_TEXT_FACTOR = 5  # a text takes four bytes for each character if one is not Latin, and is read from its bytes
_MAX_WEIGHT = 2**40

# Names of operations, by what they do: store in the memo, load from it, and make tuples, entries of dicts, members of
# sets.
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_MAKE_ENTRIES = ("DICT", "SETITEM", "SETITEMS")
_MAKE_ITEMS = ("FROZENSET", "ADDITEMS")
_BYTES_PER_OPERATION = {
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE"), _CONTAINER_BYTES),
    **dict.fromkeys(("LIST", "DICT", "FROZENSET", *_TUPLES), _CONTAINER_BYTES),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL", "INST"), _NAME_BYTES),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "PERSID", "BINPERSID"), _CALL_BYTES),
    "MARK": _MARK_BYTES,
}
_REFUSED = ("EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER")


def _charge_operations(data: bytes, budget: MemoryBudget) -> None:
    """Charge for all objects that a pickle would make, by running its operations on a stack of weights.

    A weight stands for a value. It is the number of objects that are visited to hash the value: for a tuple, 1 and the
    weights of its items. :mod:`pickletools` documents how many values each operation takes from the stack, and how many
    it puts there.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    memo_length = 0
    for operation, argument in _operations(data, budget):
        name = operation.name
        if name in _REFUSED:
            raise ValueError(f"{name} has no place in a checkpoint")
        if type(argument) is int and abs(argument) >= _MIN_REFUSED_INTEGER:
            raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
        budget.charge(_BYTES_PER_OPERATION.get(name, 0) + _SLOT_BYTES * len(operation.stack_after))
        if name in _PUTS:
            index = len(memo) if argument is None else int(argument)
            memo[index] = stack[-1] if stack else 1
            budget.charge(_ENTRY_BYTES + _MEMO_BYTES * max(0, index + 1 - memo_length))
            memo_length = max(memo_length, index + 1)
            continue
        if name in _GETS:
            stack.append(memo.get(argument, 1))
            continue
        if name == "POP" and marks and marks[-1] == len(stack):  # the mark is on top, and is what POP removes
            marks.pop()
            continue
        operands = operation.stack_before
        if pickletools.markobject in operands:  # it takes all values above the last mark, and the operands below it
            begin = marks.pop() if marks else 0
            operands = operands[: operands.index(pickletools.markobject)]
            items = stack[begin:]
            del stack[begin:]
        else:
            items = stack[max(0, len(stack) - len(operands)) :]
        del stack[max(0, len(stack) - len(operands)) :]
        if name == "MARK":
            marks.append(len(stack))
            continue
        if argument is not None:
            budget.charge(sys.getsizeof(argument))
        if name in _MAKE_ENTRIES:
            keys = items[-2:-1] if name == "SETITEM" else items[::2]
            budget.charge(_FIRST_ENTRY_BYTES + _ENTRY_BYTES * len(keys) + _SLOT_BYTES * sum(keys))
        elif name in _MAKE_ITEMS:
            budget.charge(_ITEM_BYTES * len(items) + _SLOT_BYTES * sum(items))
        weight = 1
        if name in _TUPLES:
            weight = min(1 + sum(items), _MAX_WEIGHT)
        elif name == "DUP":
            weight = items[-1]
        stack += [weight] * len(operation.stack_after)


def _operations(data: bytes, budget: MemoryBudget) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    """Yield operations with their arguments, as :func:`pickletools.genops`. A long argument must fit the budget."""
    stream = io.BytesIO(data)
    while True:
        code = stream.read(1)
        operation = _OPERATIONS.get(code)
        if operation is None:
            fault = f"an unknown operation {code!r}" if code else "no end"
            raise ValueError(f"it has {fault} at byte {stream.tell()}")
        if operation.arg is None:
            yield operation, None
        else:
            index = stream.tell()
            length = min(_length(data, index, operation.arg), len(data) - index)
            if length > _LONG_ARGUMENT:
                budget.require(_TEXT_FACTOR * length)
            yield operation, operation.arg.reader(stream)
        if operation.name == "STOP":
            return


def _length(data: bytes, index: int, argument: pickletools.ArgumentDescriptor) -> int:
    """Return the length in bytes of the argument at an index; 0 for types of a few bytes."""
    if argument.n == pickletools.UP_TO_NEWLINE:
        end = index
        for _ in range(2 if argument.name.endswith("_pair") else 1):
            end = data.find(b"\n", end) + 1 or len(data)
        return end - index
    return int.from_bytes(data[index : index + _LENGTH_BYTES.get(argument.n, 0)], "little")


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
