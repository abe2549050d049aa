"""Loads the installed plugins, each by itself, so that a broken one hides nobody."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import pluggy

from fsdp_core import hookspecs
from fsdp_core.errors import StrategyInfoError
from fsdp_core.hookspecs import ENTRY_POINT_GROUP, PROJECT
from fsdp_core.strategy_info import StrategyInfo

__all__ = ["BrokenPlugin", "Claim", "Discovery", "Provider", "discover", "error_text"]


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An installed distribution, as ``pip`` names it."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def canonical_name(self) -> str:
        """The name as package indexes compare it.

        Example:
            >>> Provider(name="My_Plugin", version="1").canonical_name
            'my-plugin'
        """
        return re.sub(r"[-_.]+", "-", self.name).lower()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One strategy, and the distribution that provides it."""

    info: StrategyInfo
    provider: Provider


@dataclass(frozen=True, kw_only=True)
class BrokenPlugin:
    """An entry point that gave no strategies but an error.

    Attributes:
        name: The entry point's name in lower case, by convention the plugin's main strategy name.
        provider: The distribution that it belongs to.
        error: What it raised.
    """

    name: str
    provider: Provider
    error: BaseException

    def __str__(self) -> str:
        return f"{self.provider} failed to load: {error_text(self.error)}"


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What all installed plugins said.

    Attributes:
        claims: By strategy name, in alphabetical order; a name with several claims is ambiguous.
        broken: The plugins that failed.
    """

    claims: Mapping[str, tuple[Claim, ...]]
    broken: tuple[BrokenPlugin, ...]


def error_text(error: BaseException) -> str:
    """An exception in one line.

    Example:
        >>> error_text(KeyError("a"))
        "KeyError: 'a'"
    """
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


@cache
def discover() -> Discovery:
    """Load every plugin of the entry-point group ``fsdp.strategies``, once per process.

    Never raises on account of a plugin, whatever it does at import, short of a ``KeyboardInterrupt``.
    """
    claims: dict[str, list[Claim]] = {}
    broken: list[BrokenPlugin] = []
    found = ((entry_point, _provider(entry_point)) for entry_point in entry_points(group=ENTRY_POINT_GROUP))
    for entry_point, provider in sorted(found, key=lambda pair: (pair[1].canonical_name, pair[0].name)):
        try:
            for info in _load(entry_point):
                claims.setdefault(info.name, []).append(Claim(info=info, provider=provider))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's sys.exit() must not end the process either
            broken.append(BrokenPlugin(name=entry_point.name.lower(), provider=provider, error=error))
    return Discovery(claims={name: tuple(claims[name]) for name in sorted(claims)}, broken=tuple(broken))


def _load(entry_point: EntryPoint) -> list[StrategyInfo]:
    # pluggy's own load_setuptools_entrypoints stops at the first plugin that fails; and a hook call fails as a whole
    # with any of its implementations. Hence one manager per plugin.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load())
    manager.check_pending()
    if not manager.hook.fsdp_strategies.get_hookimpls():
        raise StrategyInfoError(
            f"{entry_point.value} implements no fsdp_strategies hook. "
            "Define fsdp_strategies() there and decorate it with @fsdp_core.hookimpl."
        )
    infos: list[StrategyInfo] = []
    for result in manager.hook.fsdp_strategies():
        if not isinstance(result, Iterable):
            raise StrategyInfoError(f"fsdp_strategies() gave a {type(result).__name__}; return a list of StrategyInfo.")
        for info in result:
            if not isinstance(info, StrategyInfo):
                raise StrategyInfoError(f"fsdp_strategies() gave a {type(info).__name__} where a StrategyInfo is due.")
            infos.append(info)
    return infos


def _provider(entry_point: EntryPoint) -> Provider:
    try:
        assert entry_point.dist is not None
        return Provider(name=entry_point.dist.name, version=entry_point.dist.version)
    except Exception:  # metadata can be damaged in many ways; the plugin itself may still be sound
        return Provider(name=entry_point.module.partition(".")[0], version="(unknown version)")
