"""The form of plain data in JSON: which tags there are, and what each holds. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp_core.checkpoint.format.json_text import integer

__all__ = ["MAX_DEPTH", "check_plain"]

MAX_DEPTH = 500
"""How deep lists and objects may be nested. Saving fails at a lower depth, by Python's limit of recursion."""

#: The tags that hold a list of values.
_ITEMS = ("$tuple", "$set", "$frozenset")
#: The tags that hold a list of keys with values.
_PAIRS = ("$dict", "$ordered", "$counter", "$namespace")
#: The tags of all kinds of dicts.
_DICTS = (*_PAIRS, "$defaultdict")
#: The tags that hold a string.
_TEXTS = ("$float", "$bytes", "$path", "$datetime", "$date", "$time", "$dtype", "$device")
#: The tags of values that can be hashed, and so be keys.
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
    if type(state) is not dict or any(key.startswith("$") and key not in _DICTS for key in state):
        raise ValueError(f"it holds no state, but {'a tagged value' if type(state) is dict else type(state).__name__}")
    nodes: list[Any] = [state]
    for _ in range(MAX_DEPTH):
        nodes = [item for node in nodes for item in _check_node(node, has_tensor) if type(item) in (dict, list)]
        if not nodes:
            return
    raise ValueError("it is nested too deeply")


def _check_node(node: Any, has_tensor: Callable[[str, str], bool]) -> Iterable[Any]:
    """Refuse a list or an object that has no known form; return its parts, which are to be checked next."""
    if isinstance(node, list):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return list(node.values())
    if len(node) > 1:
        raise ValueError(f"it holds {tag!r} with other keys in one object, which has no meaning")
    content = node[tag]
    if tag in _ITEMS:
        if tag != "$tuple":
            _check_keys(_require_list(tag, content))
        return _require_list(tag, content)
    if tag in _PAIRS:
        return _check_pairs(tag, content)
    if tag == "$defaultdict":
        factory, pairs = _require_list(tag, content, 2)
        if factory is not None and type(factory) is not str:
            raise _invalid(tag)
        return _check_pairs(tag, pairs)
    if tag in ("$saved", "$tensor"):
        if not has_tensor(tag, _require_text(tag, content)):
            raise ValueError(f"it refers to a tensor {content!r} that does not exist")
    elif tag == "$ndarray":
        if type(content) is not dict or set(content) not in ({"$tensor"}, {"$saved"}):
            raise _invalid(tag)
        return (content,)
    elif tag in ("$size", "$timedelta"):
        for number in _require_list(tag, content, None if tag == "$size" else 3):
            integer(number)
    elif tag == "$complex":
        for part in _require_list(tag, content, 2):
            _require_text(tag, part)
    elif tag == "$numpy":
        dtype_text, number = _require_list(tag, content, 2)
        _require_text(tag, dtype_text)
        if type(number) is list or (type(number) is dict and not {"$float", "$complex"} & set(number)):
            raise _invalid(tag)
        return (number,)
    elif tag in _TEXTS:
        _require_text(tag, content)
    else:
        raise ValueError(f"it holds {tag!r}, which this version does not support: upgrade fsdp-core")
    return ()


def _check_pairs(tag: str, content: Any) -> list[Any]:
    """Refuse what is no list of keys with values; return all keys and values."""
    pairs = [_require_list(tag, pair, 2) for pair in _require_list(tag, content)]
    _check_keys([key for key, _ in pairs])
    return [part for pair in pairs for part in pair]


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys that can't be hashed."""
    unchecked = list(keys)
    while unchecked:
        key = unchecked.pop()
        if type(key) is dict and len(key) == 1 and next(iter(key)) in _IN_KEYS:
            ((tag, content),) = key.items()
            if tag in ("$tuple", "$frozenset"):
                unchecked += _require_list(tag, content)
        elif type(key) in (dict, list):
            raise ValueError("it holds a key, or a member of a set, that is a list or an object")


def _require_list(tag: str, content: Any, length: int | None = None) -> list[Any]:
    if type(content) is not list or (length is not None and len(content) != length):
        raise _invalid(tag)
    return content


def _require_text(tag: str, content: Any) -> str:
    if type(content) is not str:
        raise _invalid(tag)
    return content


def _invalid(tag: str) -> ValueError:
    return ValueError(f"it holds {tag!r} with an invalid value")
