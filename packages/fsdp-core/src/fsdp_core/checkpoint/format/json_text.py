"""Size limits for a checkpoint's JSON, checked before parsing, which takes many times the memory; and its types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "MAX_DIGITS",
    "MAX_JSON_BYTES",
    "check_text",
    "check_texts",
    "integer",
    "json_list",
    "parse_text",
    "string",
    "strings",
]

MAX_JSON_BYTES = 2**28
"""The maximum size of a manifest and of plain data, enough for 1.5 million chunks. Tensors are stored elsewhere."""

MAX_CONTAINERS = 2**23
"""The maximum number of lists and objects in them, which take the most memory."""

MAX_DIGITS = 4300
"""The longest integer that Python reads and writes by default."""


def check_text(text: bytes) -> None:
    """Refuse a text whose parsing would take more memory than a checkpoint's JSON needs.

    Raises:
        ValueError: It is too long, or holds too many lists and objects.
    """
    check_texts([text])


def check_texts(texts: Sequence[bytes]) -> None:
    """Refuse a text in pieces, as :func:`check_text` does.

    Raises:
        ValueError: Together they are too long, or hold too many lists and objects.
    """
    size = sum(map(len, texts))
    if size > MAX_JSON_BYTES:
        raise ValueError(f"it has {size} bytes, and the limit is {MAX_JSON_BYTES}")
    containers = sum(text.count(b"[") + text.count(b"{") for text in texts)
    if containers > MAX_CONTAINERS:
        raise ValueError(f"it holds {containers} lists and objects, and the limit is {MAX_CONTAINERS}")


def parse_text(text: bytes, **hooks: Any) -> Any:
    """Parse JSON in UTF-8.

    Args:
        text: The text.
        **hooks: Keyword arguments of :func:`json.loads`.

    Raises:
        ValueError: It is not JSON, or too large, or nested too deeply.
    """
    check_text(text)
    try:
        return json.loads(text.decode(), **hooks)  # json itself also accepts UTF-16
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" not in str(error):
            raise
        raise ValueError(f"it holds an integer of more than {MAX_DIGITS} digits, which is never saved") from error


def string(value: Any) -> str:
    """Return a value that must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def strings(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return an object whose values must be strings."""
    for key, value in entries.items():
        if not isinstance(value, str):
            raise ValueError(f"{key!r} is {value!r}, which is not a string")
    return dict(entries)


def json_list(value: Any) -> list[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def integer(value: Any) -> int:
    """Return a value that must be an integer."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value
