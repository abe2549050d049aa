"""Converts plain Python data to JSON and back, exactly. Other data is refused by name, and nothing is imported.

JSON values represent themselves, and a JSON object represents a dict with string keys. Everything else is an object
with one key that begins with ``$``::

    {"$tuple": [1, 2]}     {"$dict": [[1, "a"], [2, "b"]]}     {"$float": "nan"}     {"$timedelta": [0, 30, 0]}

A subclass of a plain type (an ``AttributeDict``, a named tuple) is stored as the plain type.
"""

from __future__ import annotations

import argparse
import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from fsdp_core.checkpoint.format.json_text import MAX_DIGITS
from fsdp_core.checkpoint.format.named_code import find_named_code
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.state.chunks import ChunkedTensor, TensorSource
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.left_out import LeftOut

__all__ = ["Keys", "TensorLeaf", "decode", "encode"]

Keys = tuple[str, ...]
TensorLeaf = Tensor | ChunkedTensor | TensorSource | LeftOut

_FACTORIES: dict[str, Callable[[], Any]] = {
    "bool": bool, "dict": dict, "float": float, "int": int, "list": list, "set": set, "str": str, "tuple": tuple
}  # fmt: skip
_ALL_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MOST_SHOWN = 20
_MAX_INTEGER = 10**MAX_DIGITS - 1


def encode(value: Any, on_tensor: Callable[[Keys, TensorLeaf], Any]) -> Any:
    """Convert a nest of plain data and tensors to JSON types.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict (any plain keys),
            ``Counter``, ``OrderedDict``, ``defaultdict``, dates and times, paths, ``argparse.Namespace``, torch's
            dtypes, devices and sizes, numpy's numbers and arrays, tensors, and nests of these.
        on_tensor: Takes the keys that lead to a tensor, and the tensor; returns its replacement.

    Returns:
        The data in JSON types.

    Raises:
        CheckpointValueError: A value has another type, or names code that Lightning would run. The message lists up to
            20 such values.

    Example:
        >>> encode({"betas": (0.9, 0.95), "best": float("inf")}, lambda keys, tensor: None)
        {'betas': {'$tuple': [0.9, 0.95]}, 'best': {'$float': 'inf'}}
    """
    encoder = _Encoder(on_tensor)
    encoded = encoder.encode(value, ())
    for keys, why in find_named_code(encoded):
        encoder.refuse(keys, why)
    if encoder.refused:
        more = len(encoder.refused) - _MOST_SHOWN
        lines = encoder.refused[:_MOST_SHOWN] + ([f"  … and {more} more"] if more > 0 else [])
        raise CheckpointValueError(
            "\n".join(["can't save this state, because nothing in a checkpoint is pickled:", *lines])
        )
    return encoded


class _Encoder:
    """Encodes a nest; ``keys`` are those that lead to a value, and ``refused`` has a line for each refused value."""

    def __init__(self, on_tensor: Callable[[Keys, TensorLeaf], Any]) -> None:
        self.on_tensor = on_tensor
        self.refused: list[str] = []
        self._open_containers: set[int] = set()  # the ids of those that are being encoded, to find a cycle

    def encode(self, value: Any, keys: Keys) -> Any:
        if value is None or type(value) in (bool, int, str):
            if type(value) is int and abs(value) > _MAX_INTEGER:
                return self._refuse_long_integer(keys)
            return value
        if isinstance(value, (Tensor, ChunkedTensor, LeftOut)):  # first, since most values of a state are tensors
            return self._encode_tensor(value, keys)
        if isinstance(value, (Mapping, list, tuple, set, frozenset, argparse.Namespace)):
            if id(value) in self._open_containers:
                return self.refuse(keys, "a container that contains itself can't be saved; leave the inner one out")
            self._open_containers.add(id(value))
            try:
                return self._encode_container(value, keys)
            finally:
                self._open_containers.discard(id(value))
        return self._encode_tensor(value, keys) if isinstance(value, TensorSource) else self._encode_scalar(value, keys)

    def _refuse_long_integer(self, keys: Keys) -> None:
        return self.refuse(keys, f"an integer of more than {MAX_DIGITS} digits; save it as a string or as bytes")

    def _encode_tensor(self, value: TensorLeaf, keys: Keys) -> Any:
        try:
            return self.on_tensor(keys, value)
        except (CheckpointValueError, ValueError) as error:
            return self.refuse(keys, str(error))

    def _encode_container(self, value: Any, keys: Keys) -> Any:
        if isinstance(value, argparse.Namespace):
            return {"$namespace": self._encode_pairs(vars(value), keys)}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, list):
            return self._encode_items(value, keys)
        if isinstance(value, tuple):
            return {"$tuple": self._encode_items(value, keys)}
        if isinstance(value, (set, frozenset)):
            tag = "$set" if isinstance(value, set) else "$frozenset"
            return {tag: [self._encode_key(item, keys) for item in value]}
        if isinstance(value, Counter):
            return {"$counter": self._encode_pairs(value, keys)}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = next((name for name, known_factory in _FACTORIES.items() if known_factory is factory), None)
            if factory is not None and name is None:
                return self.refuse(keys, f"a defaultdict over {factory!r} would need code to restore; pass dict(it)")
            return {"$defaultdict": [name, self._encode_pairs(value, keys)]}
        if isinstance(value, OrderedDict):
            return {"$ordered": self._encode_pairs(value, keys)}
        if not isinstance(value, dict):
            return self.refuse(keys, f"{_type_name(value)} is a mapping, but not a dict; {_remedy(value)}")
        if all(isinstance(key, str) and not isinstance(key, Enum) and not key.startswith("$") for key in value):
            return {str(key): self.encode(item, (*keys, str(key))) for key, item in value.items()}
        return {"$dict": self._encode_pairs(value, keys)}

    def _encode_items(self, value: Any, keys: Keys) -> list[Any]:
        return [self.encode(item, (*keys, str(index))) for index, item in enumerate(value)]

    def _encode_pairs(self, value: Mapping[Any, Any], keys: Keys) -> list[Any]:
        return [
            [self._encode_key(key, keys), self.encode(item, (*keys, _key_text(key)))] for key, item in value.items()
        ]

    def _encode_key(self, key: Any, keys: Keys) -> Any:
        if isinstance(key, (Tensor, ChunkedTensor, TensorSource)):
            return self.refuse(keys, "a tensor can't be a key or a member of a set; use tensor.item() or its name")
        return self.encode(key, (*keys, _key_text(key)))

    def _encode_scalar(self, value: Any, keys: Keys) -> Any:
        numpy = sys.modules.get("numpy")
        if isinstance(value, Enum):
            return self.refuse(keys, f"{_type_name(value)} is an enum, which needs code to restore; save its .value")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.kind not in "biufc":
                return self.refuse(keys, f"a numpy array of {value.dtype} can't be a tensor; save array.tolist()")
            array = numpy.array(value, dtype=value.dtype.newbyteorder("="))
            try:
                return {"$ndarray": self.encode(torch.from_numpy(array), keys)}
            except TypeError:
                return self.refuse(keys, f"torch has no dtype for a numpy array of {value.dtype}; convert it")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            if isinstance(value.item(), numpy.generic):  # item() of a long double is not a number of Python's
                return self.refuse(keys, f"Python has no number for numpy's {value.dtype}; convert it")
            return {"$numpy": [value.dtype.name, self.encode(value.item(), keys)]}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        for python_type, tag, write in _SCALARS:
            if isinstance(value, python_type):
                if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                    return self._refuse_long_integer(keys)
                return write(value) if tag is None else {tag: write(value)}
        return self.refuse(keys, f"{_type_name(value)} is neither plain data nor a tensor; {_remedy(value)}")

    def refuse(self, keys: Keys, reason: str) -> None:
        self.refused.append(f"  {'/'.join(keys) or 'the state itself'!r}: {reason}.")


# The order matters: a datetime is also a date. A tag of None marks types that JSON supports itself.
_SCALARS: list[tuple[type, str | None, Callable[[Any], Any]]] = [
    (int, None, int),
    (str, None, str.__str__),
    (complex, "$complex", lambda value: [repr(value.real), repr(value.imag)]),
    (bytes, "$bytes", lambda value: base64.b64encode(value).decode()),
    (bytearray, "$bytes", lambda value: base64.b64encode(value).decode()),
    (PurePath, "$path", str),
    (timedelta, "$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    (datetime, "$datetime", datetime.isoformat),
    (date, "$date", date.isoformat),
    (time, "$time", time.isoformat),
    (torch.dtype, "$dtype", dtype_name),
    (torch.device, "$device", str),
]


def _key_text(key: Any) -> str:
    try:
        return str(key)
    except ValueError:  # an integer in it is too long
        return type(key).__name__


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _remedy(value: Any) -> str:
    if type(value).__module__.startswith("omegaconf"):
        return "save OmegaConf.to_container(it) instead"
    if isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        return "save its .state_dict() instead"
    if isinstance(value, type) or callable(value):
        return "save its name instead"
    return "turn it into dicts, lists, numbers, strings and tensors, or leave it out"


def decode(value: Any, on_tensor: Callable[[str, Any], Any]) -> Any:
    """Convert the result of :func:`encode` back to the data.

    Args:
        value: The data in JSON types.
        on_tensor: Takes the tag of a tensor and the tag's value; returns the tensor.

    Returns:
        The data.

    Raises:
        CheckpointFormatError: It holds an unknown tag, or a tag with an invalid value.

    Example:
        >>> decode({"betas": {"$tuple": [0.9, 0.95]}}, lambda tag, name: None)
        {'betas': (0.9, 0.95)}
    """
    if isinstance(value, list):
        return [decode(item, on_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, on_tensor) for key, item in value.items()}
    if len(value) > 1:
        raise CheckpointFormatError(f"the state holds {tag!r} with other keys in one object, which has no meaning")
    content = value[tag]
    if tag in ("$tensor", "$saved"):
        return on_tensor(tag, content)
    if tag not in _READERS:
        raise CheckpointFormatError(f"the state holds {tag!r}, which this version does not support: upgrade fsdp-core")
    try:
        return _READERS[tag](content, lambda item: decode(item, on_tensor))
    except CheckpointFormatError:
        raise
    except Exception as error:
        raise CheckpointFormatError(f"the state holds {tag!r} with an invalid value: {error}") from error


#: Makes a value from its tag's content, and from a function that decodes the values in the content.
_Reader = Callable[[Any, Callable[[Any], Any]], Any]


def _decode_pairs(entries: Any, decode_item: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    return [(decode_item(key), decode_item(item)) for key, item in entries]


def _decode_numpy(content: Any, decode_item: Callable[[Any], Any]) -> Any:
    import numpy

    number_dtype = numpy.dtype(content[0])
    if number_dtype.kind not in "biufc":
        raise ValueError(f"{content[0]!r} is not a numeric dtype")
    return number_dtype.type(decode_item(content[1]))


_READERS: dict[str, _Reader] = {
    "$tuple": lambda content, decode_item: tuple(decode_item(item) for item in content),
    "$set": lambda content, decode_item: {decode_item(item) for item in content},
    "$frozenset": lambda content, decode_item: frozenset(decode_item(item) for item in content),
    "$size": lambda content, decode_item: torch.Size(content),
    "$dict": lambda content, decode_item: dict(_decode_pairs(content, decode_item)),
    "$ordered": lambda content, decode_item: OrderedDict(_decode_pairs(content, decode_item)),
    "$counter": lambda content, decode_item: Counter(dict(_decode_pairs(content, decode_item))),
    "$defaultdict": lambda content, decode_item: defaultdict(
        None if content[0] is None else _FACTORIES[content[0]], _decode_pairs(content[1], decode_item)
    ),
    "$namespace": lambda content, decode_item: argparse.Namespace(**dict(_decode_pairs(content, decode_item))),
    "$float": lambda content, decode_item: float(content),
    "$complex": lambda content, decode_item: complex(float(content[0]), float(content[1])),
    "$bytes": lambda content, decode_item: base64.b64decode(content, validate=True),
    "$path": lambda content, decode_item: Path(content),
    "$timedelta": lambda content, decode_item: timedelta(*content),
    "$datetime": lambda content, decode_item: datetime.fromisoformat(content),
    "$date": lambda content, decode_item: date.fromisoformat(content),
    "$time": lambda content, decode_item: time.fromisoformat(content),
    "$dtype": lambda content, decode_item: _ALL_DTYPES[content],
    "$device": lambda content, decode_item: torch.device(content),
    "$ndarray": lambda content, decode_item: decode_item(content).numpy(),
    "$numpy": _decode_numpy,
}
