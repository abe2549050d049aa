"""Loads the installed plugins, each separately, so that a broken one does not hide the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import invalidate_caches
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from itertools import chain
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
    "forget_if_outdated",
    "installed_plugins",
    "load_plugin",
    "provider_of",
]

SLOW = 1.0
"""The load time in seconds from which a plugin is reported as slow. It should take milliseconds."""

_LONGEST = 500  # characters of an error in a message


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An installed distribution, by the name that ``pip`` uses."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def canonical_name(self) -> str:
        """The normalized name, as package indexes compare it.

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
    """An entry point that failed to load.

    Attributes:
        name: The entry point's name in lower case, by convention the plugin's main strategy name.
        provider: The distribution that it belongs to.
        error: The exception that it raised.
    """

    name: str
    provider: Provider
    error: BaseException

    def __str__(self) -> str:
        return f"{self.provider} failed to load: {error_text(self.error)}"

    @property
    def remedy(self) -> str:
        """The command that may fix it."""
        if isinstance(self.error, ContractVersionError):
            return self.error.remedy
        return f"pip install --upgrade --force-reinstall {self.provider.name}"


@dataclass(frozen=True, kw_only=True)
class LoadedPlugin:
    """The result of loading one entry point.

    Attributes:
        name: The entry point's name.
        module: The module that it names.
        provider: The distribution that it belongs to.
        infos: Its strategies; none if it is broken.
        error: Why it is broken, or ``None``.
        seconds: How long loading took.
        side_effects: What loading did to the process and should not have done.
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
        """Its side effects, and its load time if it is slow."""
        if self.seconds < SLOW:
            return self.side_effects
        remedy = "it should import less, and do its work when a strategy is built"
        return (SideEffect(what=f"takes {self.seconds:.1f} s to load", remedy=remedy), *self.side_effects)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The results of loading all installed plugins.

    Attributes:
        claims: By strategy name, in alphabetical order; a name with several claims is ambiguous.
        broken: The plugins that failed to load.
        plugins: All plugins, in the order in which they were loaded.
    """

    claims: Mapping[str, tuple[Claim, ...]]
    broken: tuple[BrokenPlugin, ...]
    plugins: tuple[LoadedPlugin, ...] = ()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def error_text(error: BaseException) -> str:
    """Format an exception in one line, even if its ``__str__`` fails.

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

    No plugin can make it raise, whatever it does at import, except by a ``KeyboardInterrupt``.
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


def forget_if_outdated() -> bool:
    """Let :func:`discover` load plugins again if others are installed now, as after ``pip install`` in a notebook.

    Returns:
        Whether others are installed.
    """
    invalidate_caches()  # of Python's finders, which would not see new files within a second
    loaded = [(plugin.name, plugin.module, plugin.provider) for plugin in discover().plugins]
    installed = [(plugin.name, plugin.value, provider_of(plugin)) for plugin in installed_plugins()]
    if loaded == installed:
        return False
    discover.cache_clear()
    return True


def installed_plugins() -> list[EntryPoint]:
    """The entry points of the group, in a fixed order; nothing is imported."""
    try:
        plugins = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:  # one distribution's damaged file fails the whole call; read each separately
        by_distribution: dict[str, list[EntryPoint]] = {}
        for distribution in distributions():
            # of equal names, the first counts
            by_distribution.setdefault(_canonical(distribution.name or ""), _entry_points_of(distribution))
        plugins = list(chain.from_iterable(by_distribution.values()))
    return sorted(plugins, key=lambda entry_point: (provider_of(entry_point).canonical_name, entry_point.name))


def load_plugin(entry_point: EntryPoint) -> LoadedPlugin:
    """Load one entry point's strategies; its side effects are recorded and, where possible, undone.

    Raises:
        KeyboardInterrupt: No other exception propagates, whatever the plugin does.
    """
    infos: list[StrategyInfo] = []
    side_effects: list[SideEffect] = []
    error: BaseException | None = None
    start = perf_counter()
    try:
        check_contract(entry_point.dist)
        with watched(side_effects):
            infos = _call_hook(entry_point)
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
        seconds=perf_counter() - start,
        side_effects=tuple(side_effects),
    )


def _call_hook(entry_point: EntryPoint) -> list[StrategyInfo]:
    # pluggy's own load_setuptools_entrypoints stops at the first plugin that fails, and a hook call fails if any of
    # its implementations does. Hence one manager per plugin.
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
    if len(results) < sum(
        not implementation.wrapper and not implementation.hookwrapper for implementation in hook.get_hookimpls()
    ):
        results.append(None)  # pluggy drops None results
    infos: list[StrategyInfo] = []
    for result in results:
        if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
            raise StrategyInfoError(
                f"fsdp_strategies() returned a {type(result).__name__}; return a list of StrategyInfo."
            )
        for info in result:
            if not isinstance(info, StrategyInfo):
                raise StrategyInfoError(
                    f"fsdp_strategies() returned a {type(info).__name__} instead of a StrategyInfo."
                )
            infos.append(info)
    return infos


def _entry_points_of(distribution: Distribution) -> list[EntryPoint]:
    try:
        return [entry_point for entry_point in distribution.entry_points if entry_point.group == ENTRY_POINT_GROUP]
    except Exception:  # its names can't be read, so there is nothing to load
        return []


def provider_of(entry_point: EntryPoint) -> Provider:
    """The distribution that an entry point belongs to, as far as the metadata can be read."""
    try:
        assert entry_point.dist is not None
        return Provider(name=entry_point.dist.name, version=entry_point.dist.version)
    except Exception:  # metadata can be damaged in many ways; the plugin itself may still work
        return Provider(name=entry_point.module.partition(".")[0], version="(unknown version)")
