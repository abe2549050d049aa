"""The base class of the suite, whose clauses a backend's tests inherit, and the marks of clauses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

import fsdp_core
from fsdp_core.lightning.capability_checks import capability_of
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.testing.launching.process_ranks import RankKind, RankPool, Ranks

__all__ = [
    "KINDS",
    "Clauses",
    "each_ranks",
    "needs_of",
    "on_ranks",
    "precisions",
    "requires",
    "shares_of",
    "starts_scripts",
    "undeclared",
    "with_options",
]


def requires(*needs: Capability | str) -> pytest.MarkDecorator:
    """Mark the requirements of a clause or of a parameter set: it runs only for strategies that declare all of them.

    Args:
        *needs: Capabilities, or names of options.

    Example:
        >>> from fsdp_core import Capability
        >>> @requires(Capability.CLIP_BY_NORM, "sync_each_batch")
        ... def test_clipping(): ...
        >>> test_clipping.pytestmark[0].args
        (<Capability.CLIP_BY_NORM: 'clip_by_norm'>, 'sync_each_batch')
    """
    return pytest.mark.fsdp_requires(*needs)


def on_ranks(*kinds: RankKind) -> pytest.MarkDecorator:
    """Mark a clause or a parameter set as applying only to certain kinds of ranks.

    Args:
        *kinds: The kinds of ranks.
    """
    return pytest.mark.fsdp_ranks(*kinds)


def starts_scripts(clause: Callable[..., None]) -> Callable[..., None]:
    """Mark a clause that starts scripts as users do. It applies to ranks that are processes, and takes seconds."""
    marked: Callable[..., None] = pytest.mark.fsdp_scripts(on_ranks("processes")(clause))
    return marked


def each_ranks(ranks: Ranks, results: list[Any]) -> list[Any]:
    """Select one result for each of Lightning's ranks: only the first if one controller drives all devices."""
    return results[:1] if ranks.kind == "one controller" else results


def shares_of(ranks: Ranks, world_size: int) -> int:
    """The number of shares into which data are divided; see :meth:`fsdp_core.testing.RankContext.shares`."""
    return 1 if ranks.kind == "one controller" else world_size


def undeclared(capability: Capability) -> pytest.MarkDecorator:
    """Mark a clause as applying only to strategies that do not declare a capability."""
    return pytest.mark.fsdp_undeclared(capability)


def needs_of(options: Mapping[str, Any]) -> list[Capability | str]:
    """The requirements of options: the capability that each option requests, or else its name.

    Example:
        >>> needs_of({"cpu_offload": True, "sync_each_batch": True})
        [<Capability.CPU_OFFLOAD: 'cpu_offload'>, 'sync_each_batch']
    """
    return [capability_of(name, value) or name for name, value in options.items()]


def with_options(options: Mapping[str, Any], *values: Any, id: str | None = None) -> Any:
    """A parameter set for strategies that have these options.

    Args:
        options: The strategy's options.
        *values: The parameters. By default, the options.
        id: The pytest id.
    """
    needs = needs_of(options)
    return pytest.param(*(values or (options,)), marks=[requires(*needs)] if needs else [], id=id)


def precisions(*names: str) -> pytest.MarkDecorator:
    """Run a clause with each of these precisions that the strategy declares."""
    return pytest.mark.parametrize("precision", [_precision(name) for name in names])


def _precision(name: str) -> Any:
    dtypes = ShardPrecision.named(name)
    needs = [Capability.MIXED_PRECISION] if dtypes.compute not in (None, dtypes.storage) else []
    needs += [Capability.GRADIENT_SCALING] if dtypes.scaled else []
    return pytest.param(name, marks=[requires(*needs)] if needs else [])


#: Run a clause with each kind of checkpoint that the strategy declares.
KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sharded", marks=requires(Capability.SHARDED_CHECKPOINT)),
        pytest.param("full", marks=requires(Capability.FULL_CHECKPOINT)),
    ],
)


class Clauses:
    """Tests that every sharded strategy must pass. A subclass names the strategy, and may add tests.

    Attributes:
        strategy: The name of the strategy.
        expected_failures: Reasons by clause, ``"test_name"`` or ``"test_name[parameters]"``. These clauses must fail.
        asks: By capability, the options that request it, where their names differ from core's.
        rank_pool: The class of the ranks; see :class:`~fsdp_core.testing.Ranks`. Called without arguments, once
            for all classes that choose it.
        preset_of: If ``strategy`` is a preset of another strategy, that strategy's name; messages may use it.

    Raises:
        TypeError: If a subclass redefines a clause or something that clauses use, so that these would not run as
            written, or if two base classes define a clause of the same name.

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

    #: The definitions of each class with their marks, to detect changes to them.
    _defined: ClassVar[dict[str, tuple[Any, tuple[Any, ...]]]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, _rank_pools: Callable[[type[Ranks]], Ranks]) -> Ranks:
        """The class's ranks, which live for the whole session."""
        return _rank_pools(cls.rank_pool)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings = {name for base in cls.__mro__[1:] for name in inspect.get_annotations(base)}
        homes: dict[str, type] = {}  # the class that defines a name
        for base in cls.__mro__[:-1]:  # without object
            for name in vars(base):
                if name in settings or (name.startswith("__") and name.endswith("__")):
                    continue
                if name in homes:
                    raise TypeError(
                        f"{homes[name].__name__}.{name} would hide the suite's own, in {base.__name__}.\n"
                        "Give it another name; a clause that is known to fail is named in expected_failures."
                    )
                homes[name] = base
        own_settings = inspect.get_annotations(cls)  # which subclasses may change
        cls._defined = {
            name: (vars(cls)[name], _marks(vars(cls)[name]))
            for name, home in homes.items()
            if home is cls and name not in own_settings
        }

    @classmethod
    def changed(cls) -> list[str]:
        """The names of definitions that were replaced, or marked, after the class was created."""
        return [
            f"{base.__name__}.{name}"
            for base in cls.__mro__
            for name, (value, marks) in vars(base).get("_defined", {}).items()
            if inspect.getattr_static(cls, name, None) is not value or _marks(value) != marks
        ]

    @classmethod
    def clauses(cls) -> list[str]:
        """The names of all clauses, without the class's own tests."""
        return [name for base in cls.__mro__[1:] for name in vars(base).get("_defined", {}) if name.startswith("test")]

    @classmethod
    def own_name(cls, front_end: FrontEnd) -> str:
        """The strategy's name in messages: its own, or that of the strategy of which it is a preset."""
        own: str = cls.strategy_class(front_end)().strategy_name
        assert own in (cls.strategy, cls.preset_of)
        return own

    @classmethod
    def strategy_class(cls, front_end: FrontEnd) -> Any:
        """The class of the strategy."""
        return cls.class_of(cls.strategy, front_end)

    @staticmethod
    def class_of(strategy: str, front_end: FrontEnd) -> Any:
        """The class of a strategy, by name."""
        strategy_class = fsdp_core.resolve(strategy, front_end)
        return strategy_class.func if isinstance(strategy_class, partial) else strategy_class


def _marks(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "pytestmark", ()))
