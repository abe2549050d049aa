"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_size"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kMGT])(i?))?B?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """The bytes that a size means.

    Args:
        text: Such as ``"80GiB"`` (of 1,024³ bytes), or ``"80GB"`` or ``"80G"`` (of 1,000³).

    Raises:
        ValueError: It is no size.

    Example:
        >>> parse_size("80GiB"), parse_size("24 GB"), parse_size("512M")
        (85899345920, 24000000000, 512000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size. Write such as 80GiB, or 24GB.")
    number, unit, binary = match.groups()
    power = 0 if unit is None else "kmgt".index(unit.lower()) + 1
    return int(float(number) * (1024 if binary else 1000) ** power)
