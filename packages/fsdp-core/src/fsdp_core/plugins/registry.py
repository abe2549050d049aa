"""Looks up a strategy's description and class by name, and says what to type next if there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from functools import partial
from typing import Any, get_args

from fsdp_core.errors import (
    BrokenStrategyError,
    DuplicateStrategyError,
    StrategyNotInstalledError,
    StrategyUnavailableError,
    UnknownStrategyError,
    UnsupportedCapabilityError,
)
from fsdp_core.plugins import availability
from fsdp_core.plugins.auto_info import AUTO
from fsdp_core.plugins.availability import import_object, why_unavailable
from fsdp_core.plugins.discovery import BrokenPlugin, Claim, Provider, discover, error_text, forget_if_outdated
from fsdp_core.plugins.lightning_names import kept_by_lightning
from fsdp_core.plugins.strategy_info import FrontEnd, StrategyInfo

__all__ = [
    "CUTOFF",
    "FIRST_PARTY",
    "ambiguity",
    "ambiguous_strategy",
    "broken",
    "check_classes",
    "claimants",
    "describe",
    "describe_passed_over",
    "duplicates",
    "is_kept",
    "kept_names",
    "known_names",
    "lightnings_own",
    "likeness",
    "not_installed",
    "provider",
    "resolve",
    "strategies",
    "unavailable",
    "unknown_strategy",
]

FIRST_PARTY = {
    "ddp_fully_sharded": "fsdp-cuda-native",
    "fsdp2": "fsdp-fsdp2",
    "fsdp2_cpu_offload": "fsdp-fsdp2",
    "fsdp_native": "fsdp-cuda-native",
    "fsdp_native_full_shard_offload": "fsdp-cuda-native",
    "xla_fsdp": "fsdp-xla",
    "xla_fsdp_full": "fsdp-xla",
    "xla_fsdp_spmd": "fsdp-xla",
}
"""Names of this project's own packages, for the advice to install them."""

FRONT_ENDS = {"trainer": "lightning.pytorch.Trainer", "fabric": "lightning.fabric.Fabric"}
CUTOFF = 0.6  # difflib's own for close matches


def strategies() -> dict[str, StrategyInfo]:
    """The strategies of the installed packages, by name, in alphabetical order.

    ``"fsdp_auto"``, which chooses one of them, is not among them. Names that several packages claim are left out (see
    :func:`duplicates`), as are those of plugins that failed to load (see :func:`broken`). For whether a strategy can
    run on this machine, see :func:`unavailable`.
    """
    return {name: claims[0].info for name, claims in discover().claims.items() if len(claims) == 1}


def describe(name: str) -> StrategyInfo:
    """What is known about a strategy, without importing it.

    Args:
        name: A strategy name, in any case.

    Raises:
        UnknownStrategyError: If no installed package provides it; a :class:`StrategyNotInstalledError` if a known
            package does.
        DuplicateStrategyError: If several packages provide it.
        BrokenStrategyError: If the plugin that should provide it failed to load.
    """
    return _find_claim(name).info


def provider(name: str) -> Provider:
    """The distribution that provides a strategy. Raises as :func:`describe` does."""
    return _find_claim(name).provider


def unavailable(name: str) -> str | None:
    """Why a strategy can't run on this machine, or ``None`` if it can.

    Raises:
        BrokenStrategyError: If the plugin's probe fails. Otherwise as :func:`describe`.
    """
    return why_unavailable(_find_claim(name))


def check_classes(name: str) -> None:
    """Check that a strategy's classes exist, without importing anything.

    Raises:
        BrokenStrategyError: A class does not exist. Otherwise as :func:`describe`.
    """
    availability.check_classes(_find_claim(name))


def resolve(name: str, front_end: FrontEnd) -> Callable[..., Any]:
    """Import a strategy.

    Args:
        name: A strategy name, in any case.
        front_end: ``"trainer"`` for ``lightning.pytorch.Trainer``, ``"fabric"`` for ``lightning.fabric.Fabric``.

    Returns:
        The strategy's class; if the name is a preset, a :func:`functools.partial` of the class with its options.

    Raises:
        StrategyUnavailableError: If the strategy can't run on this machine.
        UnsupportedCapabilityError: If it has no class for this front end.
        BrokenStrategyError: If it can't be imported.

    Also raises as :func:`describe` does.
    """
    if front_end not in get_args(FrontEnd):
        raise ValueError(f"no front end called {front_end!r}.\nGive 'trainer' or 'fabric'.")
    claim = _find_claim(name)
    info = claim.info
    target: str | None = getattr(info, front_end)
    if target is None:
        raise _no_such_front_end(claim, front_end)
    reason = why_unavailable(claim)
    if reason is not None:
        raise StrategyUnavailableError(
            f"strategy {info.name!r} ({claim.provider}) can't run here: {reason}\n"
            "Type `fsdp list` to see which strategies can."
        )
    try:
        strategy: Callable[..., Any] = import_object(target)
    except Exception as error:
        raise BrokenStrategyError(
            f"strategy {info.name!r} ({claim.provider}) can't be imported from {target!r}: {error_text(error)}\n"
            f"Fix it, or type: pip install --upgrade --force-reinstall {claim.provider.name}"
        ) from error
    return partial(strategy, **info.presets) if info.presets else strategy


def duplicates() -> dict[str, tuple[Provider, ...]]:
    """The names that can't be used because several distributions claim them, with these distributions."""
    return {
        name: tuple(claim.provider for claim in claims) for name, claims in discover().claims.items() if len(claims) > 1
    }


def broken() -> tuple[BrokenPlugin, ...]:
    """The plugins that failed to load, with their errors."""
    return discover().broken


def kept_names() -> dict[str, Provider]:
    """The names that a package claims and Lightning keeps for itself, under at least one front end."""
    providers = {name: claims[0].provider for name, claims in discover().claims.items() if len(claims) == 1}
    return {name: source for name, source in providers.items() if kept_by_lightning(name, source.canonical_name)}


def not_installed() -> dict[str, str]:
    """This project's own names that are not installed, with the package to install for each."""
    present = _packages()
    return {
        name: package
        for name, package in FIRST_PARTY.items()
        if package not in present and name not in discover().claims
    }


def known_names() -> list[str]:
    """Every name for which :func:`resolve` returns a class or raises something more specific than "unknown"."""
    discovery = discover()
    return sorted({AUTO.name, *discovery.claims, *FIRST_PARTY, *(plugin.name for plugin in discovery.broken)})


def claimants(name: str) -> tuple[Provider, ...]:
    """The installed distributions that claim a name, including ambiguous claims and those of broken plugins."""
    discovery = discover()
    return tuple(
        dict.fromkeys(
            [claim.provider for claim in discovery.claims.get(name, ())]
            + [plugin.provider for plugin in _broken_plugins_of(name)]
        )
    )


def likeness(name: str, candidates: Iterable[str]) -> tuple[float, str]:
    """The similarity of the candidate closest to ``name``, from 0 to 1, and that candidate.

    Example:
        >>> likeness("fsdp3", ["fsdp2", "ddp"])
        (0.8, 'fsdp2')
        >>> likeness("native_fsdp", ["fsdp_native", "xla_fsdp"])
        (1.0, 'fsdp_native')
    """
    ordered_name = _sort_words(name)

    def ratio(candidate: str) -> float:
        return max(
            SequenceMatcher(None, candidate, name).ratio(),
            SequenceMatcher(None, _sort_words(candidate), ordered_name).ratio(),
        )

    return max(((ratio(candidate), candidate) for candidate in candidates), default=(0.0, ""))


def _sort_words(name: str) -> str:
    """The name with its words in alphabetical order, which may be all that a wrong one gets wrong."""
    return "_".join(sorted(name.replace("-", "_").split("_")))


def unknown_strategy(name: str, lightning_names: Iterable[str] = ()) -> UnknownStrategyError:
    """The error for an unknown name.

    Args:
        name: The requested name.
        lightning_names: Lightning's own names, if the name was passed to Lightning.
    """
    score, nearest = likeness(name, known_names())
    lightning_score, lightning_nearest = likeness(name, lightning_names)
    guesses = [repr(nearest)] if score >= CUTOFF else []
    if lightning_score >= max(CUTOFF, score):
        guesses.append(f"Lightning's own {lightning_nearest!r}")
    question = f" Did you mean {' or '.join(guesses)}?" if guesses else ""
    question = _class_instead(name) or question
    return UnknownStrategyError("\n".join([f"no strategy named {name!r}.{question}", *_inventory()]))


def _class_instead(name: str) -> str:
    """What to write instead of a class path, with a leading space; empty for any other name.

    Lightning passes names on in lower case.
    """
    path, _, last = name.rpartition(".")
    for info in sorted(strategies().values(), key=lambda info: len(info.presets)):
        for reference in filter(None, (info.trainer, info.fabric)):
            module, _, attribute = reference.partition(":")
            if last.lower() == attribute.lower() and f"{module}.".startswith(f"{path or module}."):
                return (
                    f" {attribute} is the class of {info.name!r}: write strategy={info.name!r}, or pass an object of "
                    f"the class. On LightningCLI's command line, type --trainer.strategy {info.name}, or, to set "
                    f"options, --trainer.strategy.class_path {path or module}.{attribute}"
                )
    return ""


def lightnings_own(name: str) -> UnknownStrategyError:
    """The error for one of Lightning's own names where one of ours is required."""
    score, nearest = likeness(name, known_names())
    question = f" Did you mean {nearest!r}?" if score >= CUTOFF else ""
    front_ends = " and ".join(FRONT_ENDS[front_end] for front_end in kept_by_lightning(name))
    return UnknownStrategyError(
        f"{name!r} is Lightning's own strategy, and none of these packages': {front_ends} take it as it is, "
        f"and Lightning's documentation describes it.{question}\n" + "\n".join(_inventory())
    )


def ambiguous_strategy(name: str) -> DuplicateStrategyError:
    """The error for a name that several distributions claim, one of :func:`duplicates`."""
    return DuplicateStrategyError("\n".join(ambiguity(name, duplicates()[name])))


def ambiguity(name: str, claimed_by: Iterable[Provider]) -> tuple[str, str]:
    """What is wrong with a name that is claimed more than once, and what to type.

    Example:
        >>> ambiguity("mine", [Provider(name="a-plugin", version="1.0"), Provider(name="b-plugin", version="2.0")])[1]
        'Uninstall all but one; type: pip uninstall a-plugin or pip uninstall b-plugin'
    """
    providers = list(dict.fromkeys(claimed_by))
    if len(providers) == 1:
        return (
            f"strategy {name!r} is ambiguous: {providers[0]} provides it more than once.",
            f"Report this to the authors of {providers[0].name}; to get rid of it, type: "
            f"pip uninstall {providers[0].name}",
        )
    return (
        f"strategy {name!r} is ambiguous: {_join_with_and(providers)} provide it.",
        f"Uninstall all but one; type: {' or '.join(f'pip uninstall {claimant.name}' for claimant in providers)}",
    )


def is_kept(info: StrategyInfo, claimed_by: Provider) -> bool:
    """Whether Lightning keeps a strategy's name under every front end that the strategy has a class for."""
    front_ends = kept_by_lightning(info.name, claimed_by.canonical_name)
    return all(front_end in front_ends for front_end in get_args(FrontEnd) if getattr(info, front_end) is not None)


def describe_passed_over(name: str, claimed_by: Provider) -> tuple[str, str]:
    """What happens to a claim to one of Lightning's own names, and what to type.

    Example:
        >>> describe_passed_over("dp", Provider(name="a-plugin", version="1.0"))[0]
        "Lightning keeps the name 'dp' for its own strategy under Fabric, and ignores a-plugin 1.0's."
    """
    front_ends = " and ".join(front_end.title() for front_end in kept_by_lightning(name, claimed_by.canonical_name))
    return (
        f"Lightning keeps the name {name!r} for its own strategy under {front_ends}, and ignores {claimed_by}'s.",
        f"Have its authors choose another name; to remove it, type: pip uninstall {claimed_by.name}",
    )


def _inventory(*, missing: bool = True) -> list[str]:
    """The installed strategies, those that could be installed (``missing``), and what is wrong, one line each."""
    by_provider: dict[Provider, list[str]] = {}
    for name, claims in discover().claims.items():
        if len(claims) == 1:
            by_provider.setdefault(claims[0].provider, []).append(name)
    installed = "; ".join(f"{', '.join(names)} ({source})" for source, names in by_provider.items())
    lines = [f"Installed: {installed or 'none'}."]
    by_package: dict[str, list[str]] = {}
    if missing:
        for name, package in not_installed().items():
            by_package.setdefault(package, []).append(name)
    lines += [f"Not installed: {', '.join(names)} → pip install {package}" for package, names in by_package.items()]
    lines += [f"Claimed twice: {name} ({_join_with_and(providers)})" for name, providers in duplicates().items()]
    return lines + [f"Broken: {plugin}" for plugin in broken()]


def _find_claim(name: str) -> Claim:
    if not isinstance(name, str):
        raise TypeError(f"a strategy's name is a string, not a {type(name).__name__}.\nType `fsdp list` to see them.")
    key = name.lower()
    claims = discover().claims.get(key, ())
    if key == AUTO.name:
        claims = (Claim(info=AUTO, provider=_own_provider()), *claims)
    if len(claims) == 1:
        return claims[0]
    if claims:
        raise DuplicateStrategyError("\n".join(ambiguity(key, [claim.provider for claim in claims])))
    for plugin in _broken_plugins_of(key):
        raise BrokenStrategyError(
            f"strategy {key!r} can't be used: {plugin}\nFix it, or type: {plugin.remedy}"
        ) from plugin.error
    if forget_if_outdated():
        return _find_claim(key)
    package = FIRST_PARTY.get(key)
    if package in _packages():
        raise StrategyNotInstalledError(
            f"the installed {package} has no strategy {key!r}.\nType: pip install --upgrade {package}"
        )
    if package is not None:
        raise StrategyNotInstalledError(
            "\n".join([f"strategy {key!r} is not installed. Type: pip install {package}", *_inventory(missing=False)])
        )
    raise lightnings_own(key) if kept_by_lightning(key) else unknown_strategy(key)


def _own_provider() -> Provider:
    from fsdp_core import __version__

    return Provider(name="fsdp-core", version=__version__)


def _broken_plugins_of(name: str) -> list[BrokenPlugin]:
    """The broken plugins that would have provided a name, as far as is known."""
    package = FIRST_PARTY.get(name)
    return [plugin for plugin in discover().broken if plugin.name == name or plugin.provider.canonical_name == package]


def _packages() -> set[str]:
    discovery = discover()
    providers = [claim.provider for claims in discovery.claims.values() for claim in claims]
    return {claimant.canonical_name for claimant in providers + [plugin.provider for plugin in discovery.broken]}


def _join_with_and(providers: Iterable[Provider]) -> str:
    return " and ".join(str(claimant) for claimant in providers)


def _no_such_front_end(claim: Claim, front_end: FrontEnd) -> UnsupportedCapabilityError:
    other = "fabric" if front_end == "trainer" else "trainer"
    name = claim.info.name
    alternatives = [info.name for info in strategies().values() if getattr(info, front_end) is not None]
    instead = f", or here one of: {', '.join(alternatives)}" if alternatives else ""
    return UnsupportedCapabilityError(
        f"strategy {name!r} ({claim.provider}) has no class for {FRONT_ENDS[front_end]}, "
        f"only one for {FRONT_ENDS[other]}.\n"
        f"Use {FRONT_ENDS[other]}(strategy={name!r}){instead}."
    )
