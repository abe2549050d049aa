"""The description of a strategy by its plugin: plain data, so that listing names imports no implementation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fsdp_core.errors import StrategyInfoError
from fsdp_core.plugins.capabilities import Capability

__all__ = ["FrontEnd", "Option", "Plain", "StrategyInfo"]

FrontEnd: TypeAlias = Literal["trainer", "fabric"]
Plain: TypeAlias = bool | int | float | str | None

_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword argument of a strategy's constructor.

    Args:
        name: The keyword.
        default: Its default, as plain data; write a default that is an object as a string.
        help: One sentence, without the default.

    Example:
        >>> Option(name="cpu_offload", default=False, help="Keep the shards in host memory.").default
        False
    """

    name: str
    default: Plain = None
    help: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise StrategyInfoError(
                f"an option can't be called {self.name!r}: it isn't a Python identifier.\n"
                "Write the name of the constructor's keyword argument."
            )
        if not isinstance(self.default, Plain):
            raise StrategyInfoError(
                f"option {self.name!r} has a default of type {type(self.default).__name__}, which isn't plain data.\n"
                "Write None, a bool, a number or a string."
            )


@dataclass(frozen=True, kw_only=True)
class StrategyInfo:
    """The description of one strategy name. A plugin's ``fsdp_strategies`` hook returns these.

    Classes and functions are named by strings, ``"module:attribute"``, and imported when needed.

    Args:
        name: What users type, as in ``Trainer(strategy=name)``. Lower case, because Lightning lower-cases names.
        summary: One sentence for ``fsdp list``.
        trainer: The strategy class for ``lightning.pytorch.Trainer``, or ``None`` if there is none.
        fabric: The strategy class for ``lightning.fabric.Fabric``, or ``None`` if there is none.
        accelerators: Lightning's names of the accelerators that it runs on; ``"any"`` stands for each that
            :mod:`torch.accelerator` knows.
        capabilities: What it can do, as :class:`Capability` values or their names.
        options: The constructor's keyword arguments.
        presets: The options that this name fixes, with their values.
        requires: Requirements as in ``pip install``, checked before the probe, without importing anything.
        probe: A function without arguments that returns ``None`` if the strategy can run on this machine, and the
            reason as a string if it can't. It must import neither torch nor Lightning.

    Raises:
        StrategyInfoError: If a field is invalid.

    Example:
        >>> info = StrategyInfo(
        ...     name="my_fsdp",
        ...     summary="Shards as my company does.",
        ...     trainer="my_fsdp.trainer:MyStrategy",
        ...     accelerators=("cpu",),
        ...     capabilities=("clip_by_norm",),
        ...     options=(Option(name="level", default=1, help="How much."),),
        ...     presets={"level": 3},
        ... )
        >>> info.capabilities, info.presets, info.fabric
        (frozenset({<Capability.CLIP_BY_NORM: 'clip_by_norm'>}), {'level': 3}, None)
        >>> StrategyInfo(name="My FSDP", summary="")
        Traceback (most recent call last):
            ...
        fsdp_core.errors.StrategyInfoError: a strategy can't be called 'My FSDP'.
        Use a lower-case letter, then lower-case letters, digits, '_', '-' or '.', such as 'my_fsdp'.
    """

    name: str
    summary: str
    trainer: str | None = None
    fabric: str | None = None
    accelerators: tuple[str, ...] = ()
    capabilities: frozenset[Capability] = frozenset()
    options: tuple[Option, ...] = ()
    presets: Mapping[str, Plain] = field(default_factory=dict, hash=False)
    requires: tuple[str, ...] = ()
    probe: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise StrategyInfoError(
                f"a strategy can't be called {self.name!r}.\n"
                "Use a lower-case letter, then lower-case letters, digits, '_', '-' or '.', such as 'my_fsdp'."
            )
        summary: object = self.summary
        if not isinstance(summary, str):
            raise self._error(f"summary is a {type(summary).__name__}", "Write one sentence, as a string.")
        for role in ("trainer", "fabric", "probe"):
            target = getattr(self, role)
            if target is not None and not (isinstance(target, str) and _OBJECT.fullmatch(target)):
                raise self._error(f"{role} is {target!r}", "Write it as a string, 'package.module:attribute'.")
        if self.trainer is None and self.fabric is None:
            raise self._error("it has neither a Trainer nor a Fabric class", "Give trainer=, fabric= or both.")
        for role, item_class in {"accelerators": str, "options": Option, "requires": str}.items():
            if isinstance(getattr(self, role), str):
                raise self._error(f"{role} is a string", f"Give a tuple: {role}=({getattr(self, role)!r},).")
            object.__setattr__(self, role, tuple(getattr(self, role)))
            for item in getattr(self, role):
                if not isinstance(item, item_class):
                    wrong = f"{role} holds a {type(item).__name__} instead of a {item_class.__name__}"
                    raise self._error(wrong, f"Give a tuple of {item_class.__name__}.")
        if not self.accelerators:
            raise self._error("accelerators is empty", "Name what it runs on, such as accelerators=('any', 'cpu').")
        names = [option.name for option in self.options]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise self._error(f"options name {', '.join(twice)} more than once", "Keep one Option of each name.")
        try:
            object.__setattr__(self, "capabilities", frozenset(Capability(item) for item in self.capabilities))
        except ValueError as error:
            raise self._error(str(error), f"The capabilities are: {', '.join(Capability)}.") from None
        presets: dict[str, object] = dict(self.presets)
        object.__setattr__(self, "presets", presets)
        for name, value in presets.items():
            if not isinstance(value, Plain):
                wrong = f"the preset {name!r} is a {type(value).__name__}, which isn't plain data"
                raise self._error(wrong, "Write None, a bool, a number or a string.")
        unknown = self.presets.keys() - {option.name for option in self.options}
        if unknown:
            raise self._error(
                f"presets name {', '.join(sorted(unknown))}, which is not an option",
                "List it in options, with its default.",
            )

    def _error(self, what: str, remedy: str) -> StrategyInfoError:
        return StrategyInfoError(f"strategy {self.name!r} has an invalid description: {what}.\n{remedy}")

    def as_dict(self) -> dict[str, Any]:
        """This description as plain data that :mod:`json` can serialize.

        Example:
            >>> info = StrategyInfo(name="mine", summary="", fabric="mine.fabric:Mine", accelerators=("cpu",))
            >>> info.as_dict()["fabric"]
            'mine.fabric:Mine'
        """
        return {
            "name": self.name,
            "summary": self.summary,
            "trainer": self.trainer,
            "fabric": self.fabric,
            "accelerators": list(self.accelerators),
            "capabilities": sorted(self.capabilities),
            "options": [{"name": item.name, "default": item.default, "help": item.help} for item in self.options],
            "presets": dict(self.presets),
            "requires": list(self.requires),
        }
