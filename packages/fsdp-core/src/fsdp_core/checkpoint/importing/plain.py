"""Converts the records of an unpickled file to plain data and tensors; unknown names are refused by path."""

from __future__ import annotations

import argparse
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch

from fsdp_core.checkpoint.format.named_code import INSTANTIATOR, INSTANTIATORS
from fsdp_core.checkpoint.format.state_paths import join_path, split_path
from fsdp_core.checkpoint.importing.memory_budget import current_budget, json_bytes
from fsdp_core.checkpoint.importing.unpickling import RecordedCall, RecordedName
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.chunks import TensorSource

__all__ = ["Keys", "Make", "PlainReader", "Storage"]

Keys = tuple[str, ...]
Make = Callable[[tuple[Any, ...], Any], Any]
"""Creates the value of a named object from its arguments and its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """A tensor storage in a file of :func:`torch.save`.

    Attributes:
        key: Its name in the file.
        dtype: Its dtype; ``None`` for an untyped storage, whose tensors have their own.
        nbytes: Its size in bytes.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MOST_SHOWN = 20

# The bytes charged for a value each time that it is read: for the value and all copies that are made of it until it is
# written as JSON. The values in a container are charged by themselves.
_VALUE_BYTES = 48
_CONTAINER_BYTES: dict[type, int] = {list: 260, tuple: 400, dict: 700, set: 460, frozenset: 460}
_ENTRY_BYTES = 200
_CALL_BYTES = 800
_TENSOR_BYTES = 2500
_PATH_COPIES = 10  # the path of a tensor is in its name, and in the names of its pieces
_JSON_COPIES = 2.5
_BYTES_COPIES = 6
#: The default factories that a defaultdict may have.
_FACTORIES = {f"builtins.{factory.__name__}": factory for factory in (bool, dict, float, int, list, set, str, tuple)}


class PlainReader:
    """Converts the result of :func:`~fsdp_core.checkpoint.importing.unpickling.unpickle` to plain data.

    Args:
        further_makers: Factories for additional names.
        drop: Paths to omit, such as ``hyper_parameters/loss``.

    Attributes:
        refused: Why the first values that are neither plain data nor tensors were refused, by path.
        refusals: How many values were refused.
    """

    def __init__(self, further_makers: Mapping[str, Make] | None = None, drop: Iterable[str] = ()) -> None:
        self.refused: dict[str, str] = {}
        self.refusals = 0
        self._makers = {**_MAKERS, **(further_makers or {})}
        self._drop = {tuple(split_path(path)): path for path in drop}
        self._dropped: set[Keys] = set()
        self._budget = current_budget()

    def read(self, value: Any, keys: Keys = ()) -> Any:
        """Read a value; unreadable values are recorded in :attr:`refused` and replaced with ``None``.

        Raises:
            CheckpointFormatError: It is nested too deeply, or would take more memory than the import may.
        """
        try:
            return self._read(value, keys)
        except RecursionError as error:
            raise CheckpointFormatError("it is nested too deeply to be a checkpoint, or contains itself") from error

    def _read(self, value: Any, keys: Keys) -> Any:
        self._budget.charge(_bytes_to_charge(value))
        if isinstance(value, RecordedCall):
            return self._call_maker(value, keys)
        if isinstance(value, RecordedName):
            return self._read_name(value, keys)
        if isinstance(value, dict):
            return dict(self._read_pairs(value.items(), keys))
        if isinstance(value, list):
            return self._read_items(value, keys)
        if isinstance(value, tuple):
            return tuple(self._read_items(value, keys))
        if isinstance(value, set | frozenset):
            return type(value)(self._read_items(value, keys))
        if isinstance(value, Storage):
            self.refuse(keys, "the storage of a tensor, without a shape")
            return None
        return value

    def raise_if_refused(self, source: object) -> None:
        """Raise an error if values were refused.

        Raises:
            CheckpointValueError: Values were refused; the message lists their paths and the options to type.
        """
        if not self.refused:
            return
        lines = [f"  {path or 'the whole'!r}: {why}" for path, why in self.refused.items()]
        more = [f"  … and {self.refusals - len(lines)} more"] if self.refusals > len(lines) else []
        options = " ".join(f"--drop {_quote_path(path)}" for path in self.refused)
        remedy = f"Leave it out by `{options}`, or import the weights alone by `--weights-only`."
        if "" in self.refused:
            remedy = "In a process that has the code for it, save its state_dict() instead, and import that."
        raise CheckpointValueError(
            "\n".join(
                [
                    f"can't import {source}: nothing in it is run, and it holds more than plain data and tensors:",
                    *lines,
                    *more,
                    remedy,
                ]
            )
        )

    def refuse_unfound_drops(self, source: object, keys_in_source: Iterable[str]) -> None:
        """Refuse paths to drop that do not exist.

        Raises:
            CheckpointValueError: A path does not exist.
        """
        for keys, path in self._drop.items():
            if keys not in self._dropped:
                listed = ", ".join(keys_in_source)
                raise CheckpointValueError(f"there is nothing to drop at {path!r} in {source}. It holds: {listed}.")

    def refuse(self, keys: Keys, why: str) -> None:
        """Record that a value can't be read."""
        self.refusals += 1
        if len(self.refused) < _MOST_SHOWN:
            self.refused.setdefault(join_path(*keys), why)

    def add_refusals_of(self, other: PlainReader) -> None:
        """Record the values that another reader has refused."""
        self.refusals += other.refusals
        self.refused.update(list(other.refused.items())[: _MOST_SHOWN - len(self.refused)])

    def matches_drop(self, keys: Keys) -> bool:
        """Return whether a path is to be dropped, and record that it was found."""
        if keys in self._drop:
            self._dropped.add(keys)
            return True
        return False

    def _read_pairs(self, pairs: Iterable[tuple[Any, Any]], keys: Keys) -> list[tuple[Any, Any]]:
        read = []
        for raw_key, item in pairs:
            key = self._read(raw_key, keys)
            item_keys = (*keys, str(key))
            try:
                hash(key)
            except TypeError:
                self.refuse(item_keys, f"a {type(key).__name__} can't be a key")
                continue
            if self.matches_drop(item_keys):
                continue
            if key == INSTANTIATOR and item not in INSTANTIATORS:
                self.refuse(item_keys, "the name of code that Lightning would import and call")
                continue
            read.append((key, self._read(item, item_keys)))
        return read

    def _read_items(self, items: Iterable[Any], keys: Keys) -> list[Any]:
        return [self._read(item, (*keys, str(index))) for index, item in enumerate(items)]

    def _read_name(self, value: RecordedName, keys: Keys) -> Any:
        dtype = _dtype_of(value)
        if dtype is None:
            self.refuse(keys, f"{value.name}, which is code")
        return dtype

    def _read_argument(self, value: Any, keys: Keys) -> Any:
        """An argument of a call. It may also be a name or a storage, which the callee interprets."""
        if isinstance(value, RecordedName):
            return _dtype_of(value) or value
        if isinstance(value, str):  # charged less than a value, since it is not written itself
            self._budget.charge(_VALUE_BYTES + 2 * len(value))
            return value
        return value if isinstance(value, Storage) else self._read(value, keys)

    def _call_maker(self, value: RecordedCall, keys: Keys) -> Any:
        """Make what stands for the result of a call; ``None``, with a record of it, where that can't be made."""
        make = self._makers.get(value.name)
        if make is None or value.kwargs:
            self.refuse(keys, value.name)
            return None
        refusals_before = self.refusals
        args = tuple(self._read_argument(arg, keys) for arg in value.args)
        state = self._read(value.state, keys)
        pairs = self._read_pairs(value.pairs, keys)
        items = self._read_items(value.items, keys)
        if self.refusals > refusals_before:
            return None
        try:
            result = make(args, state)
            if pairs:
                result.update(pairs)
            if items:
                result.extend(items)
        except (CheckpointFormatError, CheckpointValueError) as error:
            self.refuse(keys, str(error))
        except Exception as error:
            self.refuse(keys, f"{value.name} with arguments that it does not accept ({type(error).__name__}: {error})")
        else:
            if isinstance(result, TensorSource):
                self._budget.charge(_TENSOR_BYTES + _PATH_COPIES * sum(map(len, keys)))
            elif isinstance(result, str | bytes):
                self._budget.charge(_bytes_to_charge(result))
            return result
        return None


def _bytes_to_charge(value: Any) -> int:
    """Return what to charge for a value, without the values in it."""
    value_type: type = type(value)
    if value_type in _CONTAINER_BYTES:
        return _CONTAINER_BYTES[value_type] + (_ENTRY_BYTES * len(value) if value_type is dict else 0)
    if isinstance(value, RecordedCall):
        return _CALL_BYTES + _ENTRY_BYTES * (len(value.pairs) + len(value.items))
    if value_type is str:
        return _VALUE_BYTES + len(value) + int(_JSON_COPIES * json_bytes(value))
    if value_type is bytes:
        return 8 * _VALUE_BYTES + _BYTES_COPIES * len(value)
    if value_type is int:
        return _VALUE_BYTES + int(value).bit_length()
    return 2 * _VALUE_BYTES if value_type is float else _VALUE_BYTES


def _dtype_of(value: RecordedName) -> torch.dtype | None:
    return _DTYPES.get(value.name)


def _quote_path(path: str) -> str:
    return path if re.fullmatch(r"[\w./%@:+-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def _make_namespace(args: tuple[Any, ...], state: Any) -> argparse.Namespace:
    return argparse.Namespace(**(state or {}))


def _make_default_dict(args: tuple[Any, ...], state: Any) -> Any:
    factory = args[0] if args else None
    return defaultdict(None if factory is None else _FACTORIES[factory.name])


def _make_encoded_text(args: tuple[Any, ...], state: Any) -> bytes:
    text, encoding = args
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are not written as {encoding!r}")
    return bytes(text.encode("latin1"))


def _make_bytes(args: tuple[Any, ...], state: Any) -> bytes:
    if len(args) == 2:
        return _make_encoded_text(args, state)
    return bytes(args[0]) if args else b""


def _make_numpy_dtype(args: tuple[Any, ...], state: Any) -> Any:
    import numpy

    code = str(args[0])
    order = state[1] if state else "="
    if not (re.fullmatch(r"[biufc]\d{1,2}", code) and order in ("<", ">", "=", "|")):
        raise ValueError(f"{code!r} is not a number")
    return numpy.dtype(code if order in "=|" else order + code)


def _make_numpy_scalar(args: tuple[Any, ...], state: Any) -> Any:
    import numpy

    dtype, data = args
    return numpy.frombuffer(data, dtype=dtype, count=1)[0]


def _make_numpy_array(args: tuple[Any, ...], state: Any) -> Any:
    import numpy

    _, shape, dtype, by_columns, data = state
    return numpy.frombuffer(data, dtype=dtype).reshape(shape, order="F" if by_columns else "C").copy()


def _make_numpy_buffer(args: tuple[Any, ...], state: Any) -> Any:
    import numpy

    data, dtype, shape, order = args
    return numpy.frombuffer(data, dtype=dtype).reshape(shape, order=order).copy()


def _call_with_args(make: Callable[..., Any]) -> Make:
    return lambda args, state: make(*args)


def _makers_in_modules(modules: Iterable[str], name: str, make: Make) -> dict[str, Make]:
    return {f"{module}.{name}": make for module in modules}


_NUMPY = ("numpy.core", "numpy._core")
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
_PATHS = ("pathlib", "pathlib._local")

# A subclass of a plain type is read as the plain type, as a save stores it.
_MAKERS: dict[str, Make] = {
    "collections.OrderedDict": _call_with_args(OrderedDict),
    "collections.Counter": _call_with_args(Counter),
    "collections.defaultdict": _make_default_dict,
    "builtins.set": _call_with_args(set),
    "builtins.frozenset": _call_with_args(frozenset),
    "builtins.complex": _call_with_args(complex),
    "builtins.bytes": _make_bytes,
    "builtins.bytearray": _make_bytes,
    "_codecs.encode": _make_encoded_text,
    "argparse.Namespace": _make_namespace,
    "datetime.date": _call_with_args(date),
    "datetime.datetime": _call_with_args(datetime),
    "datetime.time": _call_with_args(time),
    "datetime.timedelta": _call_with_args(timedelta),
    "datetime.timezone": _call_with_args(timezone),
    "torch.Size": _call_with_args(torch.Size),
    "torch.device": _call_with_args(torch.device),
    "torch.torch_version.TorchVersion": _call_with_args(str),
    "numpy.dtype": _make_numpy_dtype,
    **_makers_in_modules((f"{core}.multiarray" for core in _NUMPY), "scalar", _make_numpy_scalar),
    **_makers_in_modules((f"{core}.multiarray" for core in _NUMPY), "_reconstruct", _make_numpy_array),
    **_makers_in_modules((f"{core}.numeric" for core in _NUMPY), "_frombuffer", _make_numpy_buffer),
    **_makers_in_modules((f"{root}.utilities.parsing" for root in _LIGHTNING), "AttributeDict", _call_with_args(dict)),
    **_makers_in_modules((f"{root}.utilities.data" for root in _LIGHTNING), "AttributeDict", _call_with_args(dict)),
    **_makers_in_modules(_PATHS, "PosixPath", _call_with_args(PurePosixPath)),
    **_makers_in_modules(_PATHS, "PurePosixPath", _call_with_args(PurePosixPath)),
    **_makers_in_modules(_PATHS, "WindowsPath", _call_with_args(PureWindowsPath)),
    **_makers_in_modules(_PATHS, "PureWindowsPath", _call_with_args(PureWindowsPath)),
}
