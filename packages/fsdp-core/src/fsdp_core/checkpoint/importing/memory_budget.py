"""A limit for the memory of an import. Objects are charged by estimates, before or while they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fsdp_core.errors import CheckpointFormatError

__all__ = ["MemoryBudget", "current_budget", "json_bytes", "limited_memory", "memory_of_json"]

_SOURCE_FACTOR = 4
_SPARE_BYTES = 64 * 2**20
_BASE_BYTES = 4 * 2**20  # for buffers, and for modules that are imported during the import


class MemoryBudget:
    """The memory of an import: at most 4 times the size of its source, and 64 MiB.

    An object is charged with what it takes at the worst moment of the import, including the copies that are made until
    it is written. Tests compare the sum with what is allocated.

    Args:
        source_bytes: Returns the size of the source. It is called if 64 MiB are not enough.
    """

    def __init__(self, source_bytes: Callable[[], int]) -> None:
        self.used = _BASE_BYTES
        self._limit = _SPARE_BYTES
        self._source_bytes: Callable[[], int] | None = source_bytes

    def charge(self, nbytes: int) -> None:
        """Count memory that is taken.

        Raises:
            CheckpointFormatError: It is more than the import may take.
        """
        self.used += nbytes
        if self.used > self._limit:
            self.require(0)

    def require(self, nbytes: int) -> None:
        """Refuse to take this much more memory, without counting it.

        Raises:
            CheckpointFormatError: It would be more than the import may take.
        """
        if self._source_bytes is not None and self.used + nbytes > self._limit:
            self._limit += _SOURCE_FACTOR * self._source_bytes()
            self._source_bytes = None
        if self.used + nbytes > self._limit:
            raise CheckpointFormatError(
                f"reading it would take more than {self._limit >> 20} MiB of memory, {_SOURCE_FACTOR} times its size "
                f"and {_SPARE_BYTES >> 20} MiB: it makes far more values than it has bytes, as no library's checkpoint "
                "does. Import a checkpoint that you trust, or its weights alone by `--weights-only`."
            )

    @contextmanager
    def released_at_exit(self) -> Iterator[None]:
        """Give back at the end of the context what was charged in it."""
        used = self.used
        try:
            yield
        finally:
            self.used = used


#: The budget of the running import.
_CURRENT: ContextVar[MemoryBudget | None] = ContextVar("fsdp_core_import_memory", default=None)


def current_budget() -> MemoryBudget:
    """The budget of the running import; where none runs, one of 64 MiB."""
    return _CURRENT.get() or MemoryBudget(lambda: 0)


@contextmanager
def limited_memory(source_bytes: Callable[[], int]) -> Iterator[None]:
    """Give what is read in the context one budget, unless it is part of an import that has one."""
    if _CURRENT.get() is not None:
        yield
        return
    token = _CURRENT.set(MemoryBudget(source_bytes))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def json_bytes(text: str) -> int:
    r"""Return an upper bound of the bytes of a string in JSON.

    Example:
        >>> json_bytes("a b"), json_bytes("\n") >= len('"\\n"'), json_bytes("\x00" * 9) >= 9 * len("\\u0000")
        (5, True, True)
    """
    if text.isascii() and text.isprintable():
        return len(text) + text.count('"') + text.count("\\") + 2
    return (12 if text and max(text) > "\uffff" else 6) * len(text) + 2


def memory_of_json(text: bytes) -> int:
    """Return an upper bound of the memory that parsing a JSON text takes."""
    # Each sign stands for what it makes: a dict, a list, an entry of a dict, an item or another entry.
    bytes_per_sign = {b"{": 250, b"[": 100, b":": 100, b",": 70}
    return len(text) + sum(nbytes * text.count(sign) for sign, nbytes in bytes_per_sign.items())
