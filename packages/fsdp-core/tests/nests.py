"""Nests of tensors and plain data, compared bit by bit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor


def assert_same(got: Any, want: Any, at: str = "", *, extra: Collection[str] = ()) -> None:
    """Two nests have the same types, keys and values; the first may have ``extra`` keys."""
    assert type(got) is type(want), at
    if isinstance(want, dict):
        assert set(got) - set(extra) == set(want), at
        for key in want:
            assert_same(got[key], want[key], f"{at}/{key}", extra=extra)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), at
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{at}/{index}", extra=extra)
    elif isinstance(want, Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), at
        assert got.equal(want), at
    else:
        assert got == want or (got != got and want != want), at


def read_all(value: Any) -> Any:
    """A nest with all of its saved tensors read."""
    if hasattr(value, "full"):
        return value.full()
    if isinstance(value, dict):
        return {key: read_all(item) for key, item in value.items()}
    return type(value)(map(read_all, value)) if isinstance(value, list | tuple) else value
