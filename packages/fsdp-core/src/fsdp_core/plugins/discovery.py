"""Loads the installed plugins, each by itself, so that a broken one hides nobody."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from time import perf_counter

import pluggy

from fsdp_core.errors import ContractVersionError, StrategyInfoError
from fsdp_core.plugins import hookspecs
from fsdp_core.plugins.contract import check_contract
from fsdp_core.plugins.hookspecs import ENTRY_POINT_GROUP, PROJECT
from fsdp_core.plugins.side_effects import SideEffect, watched
from fsdp_core.plugins.strategy_info import StrategyInfo

__all__ = [
    "SLOW",
    "BrokenPlugin",
    "Claim",
    "Discovery",
    "LoadedPlugin",
    "Provider",
    "discover",
    "error_text",
    "installed_plugins",
    "load_plugin",
    "provider_of",
]

SLOW = 1.0
"""From how many seconds on a plugin is called slow. It should take milliseconds; a loaded machine takes its time."""

_LONGEST = 500  # characters of an error in a message


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
        return _canonical(self.name)


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

    @property
    def remedy(self) -> str:
        """The command that may mend it."""
        if isinstance(self.error, ContractVersionError):
            return self.error.remedy
        return f"pip install --upgrade --force-reinstall {self.provider.name}"


@dataclass(frozen=True, kw_only=True)
class LoadedPlugin:
    """What came of asking one entry point for its strategies.

    Attributes:
        name: The entry point's name.
        module: What it names.
        provider: The distribution that it belongs to.
        infos: Its strategies; none if it is broken.
        error: Why it is broken, or ``None``.
        seconds: How long it took.
        side_effects: What it did besides, that it should not have done.
    """

    name: str
    module: str
    provider: Provider
    infos: tuple[StrategyInfo, ...] = ()
    error: BaseException | None = None
    seconds: float = 0.0
    side_effects: tuple[SideEffect, ...] = ()

    @property
    def complaints(self) -> tuple[SideEffect, ...]:
        """Its side effects, and that it is slow if it is."""
        if self.seconds < SLOW:
            return self.side_effects
        remedy = "it should import less, and do its work when a strategy is built"
        return (SideEffect(what=f"takes {self.seconds:.1f} s to load", remedy=remedy), *self.side_effects)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What all installed plugins said.

    Attributes:
        claims: By strategy name, in alphabetical order; a name with several claims is ambiguous.
        broken: The plugins that failed.
        plugins: All of them, in the order in which they were asked.
    """

    claims: Mapping[str, tuple[Claim, ...]]
    broken: tuple[BrokenPlugin, ...]
    plugins: tuple[LoadedPlugin, ...] = ()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def error_text(error: BaseException) -> str:
    """An exception in one line, whatever its own ``__str__`` does.

    Example:
        >>> error_text(KeyError("a"))
        "KeyError: 'a'"
    """
    try:
        message = str(error)
    except Exception as fault:
        message = f"(its message can't be shown: {type(fault).__name__})"
    line = " ".join(f"{type(error).__name__}: {message}".split()).removesuffix(":")
    line = "".join(sign if sign.isprintable() else "?" for sign in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


@cache
def discover() -> Discovery:
    """Load every plugin of the entry-point group ``fsdp.strategies``, once per process.

    Never raises on account of a plugin, whatever it does at import, short of a ``KeyboardInterrupt``.
    """
    plugins = tuple(load_plugin(entry_point) for entry_point in installed_plugins())
    claims: dict[str, list[Claim]] = {}
    for plugin in plugins:
        for info in plugin.infos:
            claims.setdefault(info.name, []).append(Claim(info=info, provider=plugin.provider))
    broken = tuple(
        BrokenPlugin(name=plugin.name.lower(), provider=plugin.provider, error=plugin.error)
        for plugin in plugins
        if plugin.error is not None
    )
    return Discovery(claims={name: tuple(claims[name]) for name in sorted(claims)}, broken=broken, plugins=plugins)


def installed_plugins() -> list[EntryPoint]:
    """The entry points of the group, in a fixed order; nothing is imported."""
    try:
        found = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:  # one distribution's damaged file spoils the call; look at each by itself
        by_distribution: dict[str, list[EntryPoint]] = {}
        for distribution in distributions():
            ours = _entry_points_of(distribution)
            by_distribution.setdefault(_canonical(distribution.name or ""), ours)  # of two of one name the first counts
        found = [one for ours in by_distribution.values() for one in ours]
    return sorted(found, key=lambda one: (provider_of(one).canonical_name, one.name))


def load_plugin(entry_point: EntryPoint) -> LoadedPlugin:
    """Ask one entry point for its strategies, with its side effects noted and, where that can be done, undone.

    Raises:
        KeyboardInterrupt: Nothing else, whatever the plugin does.
    """
    infos: list[StrategyInfo] = []
    noted: list[SideEffect] = []
    error: BaseException | None = None
    began = perf_counter()
    try:
        check_contract(entry_point.dist)
        with watched(noted):
            infos = _ask(entry_point)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # a plugin's sys.exit() must not end the process either
        error = raised
    return LoadedPlugin(
        name=entry_point.name,
        module=entry_point.value,
        provider=provider_of(entry_point),
        infos=tuple(infos),
        error=error,
        seconds=perf_counter() - began,
        side_effects=tuple(noted),
    )


def _ask(entry_point: EntryPoint) -> list[StrategyInfo]:
    # pluggy's own load_setuptools_entrypoints stops at the first plugin that fails; and a hook call fails as a whole
    # with any of its implementations. Hence one manager per plugin.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load())
    manager.check_pending()
    hook = manager.hook.fsdp_strategies
    if not hook.get_hookimpls():
        raise StrategyInfoError(
            f"{entry_point.value} implements no fsdp_strategies hook. "
            "Define fsdp_strategies() there and decorate it with @fsdp_core.hookimpl."
        )
    results = hook()
    if len(results) < sum(not one.wrapper and not one.hookwrapper for one in hook.get_hookimpls()):
        results.append(None)  # which pluggy leaves out
    infos: list[StrategyInfo] = []
    for result in results:
        if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
            raise StrategyInfoError(f"fsdp_strategies() gave a {type(result).__name__}; return a list of StrategyInfo.")
        for info in result:
            if not isinstance(info, StrategyInfo):
                raise StrategyInfoError(f"fsdp_strategies() gave a {type(info).__name__} where a StrategyInfo is due.")
            infos.append(info)
    return infos


def _entry_points_of(distribution: Distribution) -> list[EntryPoint]:
    try:
        return [one for one in distribution.entry_points if one.group == ENTRY_POINT_GROUP]
    except Exception:  # its names can't be read, so there is nothing to ask
        return []


def provider_of(entry_point: EntryPoint) -> Provider:
    """The distribution that an entry point belongs to, as far as its metadata can be read."""
    try:
        assert entry_point.dist is not None
        return Provider(name=entry_point.dist.name, version=entry_point.dist.version)
    except Exception:  # metadata can be damaged in many ways; the plugin itself may still be sound
        return Provider(name=entry_point.module.partition(".")[0], version="(unknown version)")
