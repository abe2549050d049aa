"""What the suite's classes have in common: clauses that a backend's package inherits and points at a strategy."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import fsdp_core
from fsdp_core.strategy_info import FrontEnd

__all__ = ["Clauses"]


class Clauses:
    """Tests that hold for every sharded strategy. A subclass names the strategy, and may add tests of its own.

    Attributes:
        strategy: The name that users type.

    Raises:
        TypeError: A subclass has a test of the same name as a clause, which would no longer run.

    Example:
        >>> class Suite(Clauses):
        ...     def test_it_trains(self): ...
        >>> class TestMine(Suite):
        ...     strategy = "mine"
        ...     def test_it_trains(self): ...
        Traceback (most recent call last):
            ...
        TypeError: TestMine.test_it_trains would hide a clause of the suite.
        Give it another name.
    """

    strategy: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            if name.startswith("test") and any(name in vars(base) for base in cls.__mro__[1:]):
                raise TypeError(f"{cls.__name__}.{name} would hide a clause of the suite.\nGive it another name.")

    @classmethod
    def strategy_class(cls, front_end: FrontEnd) -> Any:
        """The class behind the name."""
        found = fsdp_core.resolve(cls.strategy, front_end)
        return found.func if isinstance(found, partial) else found
