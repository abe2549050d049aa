"""The JSON of a checkpoint: how large it may be, which is seen before it is parsed and takes many times the memory."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_DIGITS", "MAX_JSON_BYTES", "check_text", "parse_text"]

MAX_JSON_BYTES = 2**28
"""The largest manifest, and the largest plain data: room for a million and a half chunks. Tensors are not in them."""

MAX_CONTAINERS = 2**23
"""How many lists and objects they may hold, which take the most memory."""

MAX_DIGITS = 4300
"""The longest integer that Python reads and writes by default."""


def check_text(text: bytes) -> None:
    """Refuse a text that would take more memory than a checkpoint's JSON has use for.

    Raises:
        ValueError: It is too long, or holds too many lists and objects.
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and none is larger than {MAX_JSON_BYTES}")
    containers = text.count(b"[") + text.count(b"{")
    if containers > MAX_CONTAINERS:
        raise ValueError(f"it holds {containers} lists and objects, and none holds more than {MAX_CONTAINERS}")


def parse_text(text: bytes, **hooks: Any) -> Any:
    """Parse JSON in UTF-8.

    Args:
        text: The text.
        **hooks: As :func:`json.loads` takes them.

    Raises:
        ValueError: It is no JSON, or too large, or nested too deeply; the message says what is wrong.
    """
    check_text(text)
    try:
        return json.loads(text.decode(), **hooks)  # json itself takes UTF-16, too
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" not in str(error):
            raise
        raise ValueError(f"it holds an integer of more than {MAX_DIGITS} digits, which is never saved") from error
