"""The form of plain data in JSON: which tags there are, and what each holds. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp_core.checkpoint.format.json_text import whole

__all__ = ["MAX_DEPTH", "check_plain"]

MAX_DEPTH = 500
"""How deep lists and objects may be nested, which is deeper than Python's recursion lets them be saved."""

_ITEMS = ("$tuple", "$set", "$frozenset")
_PAIRS = ("$dict", "$ordered", "$counter", "$namespace")
_MAPS = (*_PAIRS, "$defaultdict")
_TEXTS = ("$float", "$bytes", "$path", "$datetime", "$date", "$time", "$dtype", "$device")
_IN_KEYS = ("$tuple", "$frozenset", "$complex", "$timedelta", "$numpy", "$size", *_TEXTS)


def check_plain(state: Any, has_tensor: Callable[[str, str], bool]) -> None:
    """Refuse plain data that does not have the form of what is saved, whichever part of it is read later.

    Args:
        state: The data in JSON types.
        has_tensor: Whether a tensor exists, by the tag of a reference and its name.

    Raises:
        ValueError: It does not have the form, or refers to a tensor that does not exist.

    Example:
        >>> check_plain({"betas": {"$tuple": [0.9, 0.95]}}, lambda tag, name: False)
        >>> check_plain({"w": {"$saved": "model/w"}}, lambda tag, name: False)
        Traceback (most recent call last):
            ...
        ValueError: it refers to a tensor 'model/w' that does not exist
    """
    if type(state) is not dict or any(key.startswith("$") and key not in _MAPS for key in state):
        raise ValueError(f"it holds no state, but {'a tagged value' if type(state) is dict else type(state).__name__}")
    level: list[Any] = [state]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in _parts(node, has_tensor) if type(item) in (dict, list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _parts(node: Any, has_tensor: Callable[[str, str], bool]) -> Iterable[Any]:
    """The parts of a list or an object, which must be of a known form."""
    if isinstance(node, list):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return list(node.values())
    if len(node) > 1:
        raise ValueError(f"it holds {tag!r} with other keys in one object, which has no meaning")
    held = node[tag]
    if tag in _ITEMS:
        if tag != "$tuple":
            _check_keys(_list(tag, held))
        return _list(tag, held)
    if tag in _PAIRS:
        return _of_pairs(tag, held)
    if tag == "$defaultdict":
        factory, pairs = _list(tag, held, 2)
        if factory is not None and type(factory) is not str:
            raise _invalid(tag)
        return _of_pairs(tag, pairs)
    if tag in ("$saved", "$tensor"):
        if not has_tensor(tag, _text(tag, held)):
            raise ValueError(f"it refers to a tensor {held!r} that does not exist")
    elif tag == "$ndarray":
        if type(held) is not dict or set(held) not in ({"$tensor"}, {"$saved"}):
            raise _invalid(tag)
        return (held,)
    elif tag in ("$size", "$timedelta"):
        for number in _list(tag, held, None if tag == "$size" else 3):
            whole(number)
    elif tag == "$complex":
        for part in _list(tag, held, 2):
            _text(tag, part)
    elif tag == "$numpy":
        kind, number = _list(tag, held, 2)
        _text(tag, kind)
        if type(number) is list or (type(number) is dict and not {"$float", "$complex"} & set(number)):
            raise _invalid(tag)
        return (number,)
    elif tag in _TEXTS:
        _text(tag, held)
    else:
        raise ValueError(f"it holds {tag!r}, which this version does not support: upgrade fsdp-core")
    return ()


def _of_pairs(tag: str, held: Any) -> list[Any]:
    pairs = [_list(tag, pair, 2) for pair in _list(tag, held)]
    _check_keys([key for key, _ in pairs])
    return [part for pair in pairs for part in pair]


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys that can't be hashed."""
    waiting = list(keys)
    while waiting:
        key = waiting.pop()
        if type(key) is dict and len(key) == 1 and next(iter(key)) in _IN_KEYS:
            ((tag, held),) = key.items()
            if tag in ("$tuple", "$frozenset"):
                waiting += _list(tag, held)
        elif type(key) in (dict, list):
            raise ValueError("it holds a key, or a member of a set, that is a list or an object")


def _list(tag: str, held: Any, length: int | None = None) -> list[Any]:
    if type(held) is not list or (length is not None and len(held) != length):
        raise _invalid(tag)
    return held


def _text(tag: str, held: Any) -> str:
    if type(held) is not str:
        raise _invalid(tag)
    return held


def _invalid(tag: str) -> ValueError:
    return ValueError(f"it holds {tag!r} with an invalid value")
