"""The base of the suite's classes: clauses that a backend's package inherits for its strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

import fsdp_core
from fsdp_core.lightning.capabilities import capability_of
from fsdp_core.plugins.strategy_info import Capability, FrontEnd
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.testing.ranks import RankKind, RankPool, Ranks

__all__ = [
    "KINDS",
    "Clauses",
    "each_ranks",
    "needs_of",
    "on_ranks",
    "precisions",
    "requires",
    "shares_of",
    "undeclared",
    "with_options",
]


def requires(*needs: Capability | str) -> pytest.MarkDecorator:
    """Mark what a clause, or one of its parameter sets, requires: it runs only for strategies that declare all of it.

    Args:
        *needs: Capabilities, or names of options that not every strategy has.

    Example:
        >>> from fsdp_core import Capability
        >>> @requires(Capability.CLIP_BY_NORM, "sync_each_batch")
        ... def test_clipping(): ...
        >>> test_clipping.pytestmark[0].args
        (<Capability.CLIP_BY_NORM: 'clip_by_norm'>, 'sync_each_batch')
    """
    return pytest.mark.fsdp_requires(*needs)


def on_ranks(*kinds: RankKind) -> pytest.MarkDecorator:
    """Mark a clause, or one of its parameter sets, as applying only to certain kinds of ranks.

    Args:
        *kinds: What the ranks may be.
    """
    return pytest.mark.fsdp_ranks(*kinds)


def each_ranks(ranks: Ranks, results: list[Any]) -> list[Any]:
    """The results of Lightning's ranks; just one result if one controller drives all devices."""
    return results[:1] if ranks.kind == "one controller" else results


def shares_of(ranks: Ranks, world_size: int) -> int:
    """The number of shares that data are divided into, by world size; see :meth:`fsdp_core.testing.Here.shares`."""
    return 1 if ranks.kind == "one controller" else world_size


def undeclared(capability: Capability) -> pytest.MarkDecorator:
    """Mark a clause that runs only for strategies that do not declare a capability."""
    return pytest.mark.fsdp_undeclared(capability)


def needs_of(options: Mapping[str, Any]) -> list[Capability | str]:
    """The requirements of options: the capability that each requests, or else the option itself.

    Example:
        >>> needs_of({"cpu_offload": True, "sync_each_batch": True})
        [<Capability.CPU_OFFLOAD: 'cpu_offload'>, 'sync_each_batch']
    """
    return [capability_of(name, value) or name for name, value in options.items()]


def with_options(options: Mapping[str, Any], *values: Any, id: str | None = None) -> Any:
    """One set of parameters, for strategies that have these options.

    Args:
        options: What the strategy is given.
        *values: The parameters; the options alone, if none are given.
        id: How pytest shows them.
    """
    needs = needs_of(options)
    return pytest.param(*(values or (options,)), marks=[requires(*needs)] if needs else [], id=id)


def precisions(*names: str) -> pytest.MarkDecorator:
    """Run a clause with each of these precisions that a strategy has."""
    return pytest.mark.parametrize("precision", [_precision(name) for name in names])


def _precision(name: str) -> Any:
    dtypes = ShardPrecision.named(name)
    needs = [Capability.MIXED_PRECISION] if dtypes.compute not in (None, dtypes.storage) else []
    needs += [Capability.GRADIENT_SCALING] if dtypes.scaled else []
    return pytest.param(name, marks=[requires(*needs)] if needs else [])


#: Run a clause with each kind of checkpoint that a strategy has.
KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sharded", marks=requires(Capability.SHARDED_CHECKPOINT)),
        pytest.param("full", marks=requires(Capability.FULL_CHECKPOINT)),
    ],
)


class Clauses:
    """Tests that every sharded strategy must pass. A subclass names the strategy, and may add its own tests.

    Attributes:
        strategy: The name that users type.
        expected_failures: The reason by clause, ``"test_name"`` or ``"test_name[parameters]"``. The clause must fail.
        asks: By capability, the options that request it, if their names differ from core's.
        rank_pool: What the clauses run on; see :class:`~fsdp_core.testing.Ranks`. Called without arguments, once
            for all classes that choose the same.
        preset_of: If ``strategy`` only fixes options of another strategy, that strategy's name; messages may use it.

    Raises:
        TypeError: A subclass redefines a clause, or something that clauses use, which would not run as written then; or
            two of its bases define a clause of the same name.

    Example:
        >>> class Suite(Clauses):
        ...     def test_it_trains(self): ...
        >>> class TestMine(Suite):
        ...     strategy = "mine"
        ...     def test_it_trains(self): ...
        Traceback (most recent call last):
            ...
        TypeError: TestMine.test_it_trains would hide the suite's own, in Suite.
        Give it another name; a clause that is known to fail is named in expected_failures.
    """

    strategy: ClassVar[str]
    expected_failures: ClassVar[Mapping[str, str]] = {}
    asks: ClassVar[Mapping[Capability, Mapping[str, Any]]] = {}
    rank_pool: ClassVar[type[Ranks]] = RankPool
    preset_of: ClassVar[str | None] = None

    #: What each class of clauses has defined, and the marks of it: what runs must still be that.
    _defined: ClassVar[dict[str, tuple[Any, tuple[Any, ...]]]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, _rank_pools: Callable[[type[Ranks]], Ranks]) -> Ranks:
        """The class's ranks, which live through the session."""
        return _rank_pools(cls.rank_pool)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings = {name for base in cls.__mro__[1:] for name in inspect.get_annotations(base)}
        homes: dict[str, type] = {}
        for base in cls.__mro__:
            for name in () if base is object else vars(base):
                if name in settings or (name.startswith("__") and name.endswith("__")):
                    continue
                if name in homes:
                    raise TypeError(
                        f"{homes[name].__name__}.{name} would hide the suite's own, in {base.__name__}.\n"
                        "Give it another name; a clause that is known to fail is named in expected_failures."
                    )
                homes[name] = base
        own = inspect.get_annotations(cls)  # its settings, for subclasses to change
        cls._defined = {
            name: (vars(cls)[name], _marks(vars(cls)[name]))
            for name, home in homes.items()
            if home is cls and name not in own
        }

    @classmethod
    def changed(cls) -> list[str]:
        """The names of definitions that were changed: replaced, or marked afterwards."""
        return [
            f"{base.__name__}.{name}"
            for base in cls.__mro__
            for name, (value, marks) in vars(base).get("_defined", {}).items()
            if inspect.getattr_static(cls, name, None) is not value or _marks(value) != marks
        ]

    @classmethod
    def clauses(cls) -> list[str]:
        """The names of all clauses, without the tests that the class itself adds."""
        return [name for base in cls.__mro__[1:] for name in vars(base).get("_defined", {}) if name.startswith("test")]

    @classmethod
    def own_name(cls, front_end: FrontEnd) -> str:
        """The name of the strategy's class in messages: the strategy's own, or that of which it is a preset."""
        own: str = cls.strategy_class(front_end)().strategy_name
        assert own in (cls.strategy, cls.preset_of)
        return own

    @classmethod
    def strategy_class(cls, front_end: FrontEnd) -> Any:
        """The class behind the name."""
        return cls.class_of(cls.strategy, front_end)

    @staticmethod
    def class_of(strategy: str, front_end: FrontEnd) -> Any:
        """The class behind a name."""
        found = fsdp_core.resolve(strategy, front_end)
        return found.func if isinstance(found, partial) else found


def _marks(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "pytestmark", ()))
