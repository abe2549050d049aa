"""Registers our strategy names in Lightning's registries: the only module that knows those registries.

Checked on Lightning 2.6.6. A registry is a dict from name to factory, filled when Lightning's strategies module runs;
Trainer and Fabric take a snapshot of the names and call the factory when they are built.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from fsdp_core.errors import StrategyUnavailableError, UnsupportedCapabilityError, warn, warn_of_fault
from fsdp_core.lightning.checkpoints.patched_io import install_opening, install_search
from fsdp_core.lightning.outside_steps.grad_norms import install_grad_norm
from fsdp_core.lightning.registration.accelerators import enter_accelerator
from fsdp_core.lightning.registration.deferred_names import fill_when_read
from fsdp_core.lightning.registration.sharded_elsewhere import install_refusal
from fsdp_core.lightning.registration.token_means_elsewhere import install_token_means
from fsdp_core.plugins import registry
from fsdp_core.plugins.auto_info import AUTO
from fsdp_core.plugins.discovery import forget_if_outdated
from fsdp_core.plugins.lightning_names import TAKEN_OVER
from fsdp_core.plugins.strategy_info import FrontEnd

__all__ = ["LazyStrategy", "StrategyNames", "enter"]


@dataclass(frozen=True, kw_only=True)
class _RegistryLocation:
    """Where one of Lightning's packages keeps its registry.

    Attributes:
        attribute: The registry's name in the strategies module.
        front_end: The front end whose strategies it holds.
        instead: For a stand-alone package, in which our strategies don't work: the import that the user has written,
            and the one to write instead. ``None`` for the package ``lightning``, whose classes our adapters subclass.
    """

    attribute: str
    front_end: FrontEnd
    instead: tuple[str, str] | None = None


_LOCATIONS = {
    "lightning.fabric.strategies": _RegistryLocation(attribute="STRATEGY_REGISTRY", front_end="fabric"),
    "lightning.pytorch.strategies": _RegistryLocation(attribute="StrategyRegistry", front_end="trainer"),
    "lightning_fabric.strategies": _RegistryLocation(
        attribute="STRATEGY_REGISTRY",
        front_end="fabric",
        instead=("from lightning_fabric import Fabric", "from lightning.fabric import Fabric"),
    ),
    "pytorch_lightning.strategies": _RegistryLocation(
        attribute="StrategyRegistry",
        front_end="trainer",
        instead=("import pytorch_lightning as pl", "import lightning.pytorch as pl"),
    ),
}

# The method of Lightning's connectors that tests whether strategy= is one of the registry's names.
_CONNECTORS_METHOD = "_check_config_and_set_final_flags"

# "auto" never reaches a registry; Lightning registers "single_tpu" only after its strategies module has run.
_RESERVED = frozenset({"auto", "single_tpu"})


@dataclass(frozen=True, kw_only=True)
class LazyStrategy:
    """A registry's entry for one of our names: imports and builds the strategy when Lightning calls it.

    The names that can't be used (ambiguous, broken, not installed, not for this front end) have one too, so that the
    user gets our error instead of Lightning's that the name is invalid.
    """

    name: str
    front_end: FrontEnd
    instead: tuple[str, str] | None = None

    def __call__(self, **options: Any) -> Any:
        if self.instead is not None:
            registry.describe(self.name)  # an error about the name itself comes first
            raise _other_package_error(f"strategy {self.name!r}", self.instead)
        return registry.resolve(self.name, self.front_end)(**options)


def _other_package_error(strategy: str, instead: tuple[str, str]) -> StrategyUnavailableError:
    imported, replacement = instead
    return StrategyUnavailableError(
        f"{strategy} works with the package 'lightning' (pip install lightning), "
        f"but this script imports {imported.split()[1]!r}, whose classes are others.\n"
        f"Write `{replacement}` in place of `{imported}`, everywhere in the script."
    )


def _refuse_elsewhere(strategy: object, module: str) -> None:
    """Raise if a connector got one of our strategy objects that is for another front end or another package."""
    our_module = sys.modules.get("fsdp_core.lightning.strategy")  # without it, no strategy object is ours
    location = _LOCATIONS.get(module)
    if our_module is None or location is None or not isinstance(strategy, our_module.ShardedStrategy):
        return
    if isinstance(strategy, sys.modules[module].Strategy):
        return
    class_name = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
    if location.instead is not None:
        raise _other_package_error(class_name, location.instead)
    name = strategy.strategy_name
    replacement = getattr(registry.describe(name), location.front_end)
    if replacement is None:
        registry.resolve(name, location.front_end)  # raises an error that names the front end that has a class
    raise UnsupportedCapabilityError(
        f"{class_name} can't be given to {registry.FRONT_ENDS[location.front_end]}, which has a class of its own.\n"
        f"Write `from {' import '.join(replacement.split(':'))}`, or strategy={name!r}."
    )


def enter(module: ModuleType) -> None:
    """Register every known strategy name in the registry of one of Lightning's strategies modules. Idempotent.

    Lightning's own strategies in the module learn to recognise our checkpoint folders and shards.

    The names are registered when the registry is first read, at the latest when a Trainer or Fabric is created:
    importing Lightning loads no plugin, and takes no longer than without any.

    Lightning's own names stay Lightning's, except Fabric's ``"xla_fsdp"`` when fsdp-xla is installed; a plugin that
    claims another of them is skipped with a warning.

    Args:
        module: ``lightning.pytorch.strategies``, ``lightning.fabric.strategies`` or a stand-alone package's.
    """
    install_opening(module)
    install_refusal(module)
    install_token_means(module)
    install_grad_norm()
    location = _LOCATIONS[module.__name__]
    names = getattr(module, location.attribute)

    def find_names() -> None:
        with suppress(Exception):  # register_names() meets the same exception, and warns of it
            registry.known_names()

    def register_names() -> None:
        try:
            install_search()
            _enter_names(names, module)
            if location.instead is None:
                enter_accelerator(location.front_end)
        except Exception as error:
            warn_of_fault(module.__name__, error)

    fill_when_read(names, find_names, register_names, never=_RESERVED)


def _enter_names(names: Any, module: ModuleType) -> None:
    location = _LOCATIONS[module.__name__]
    infos = {**registry.strategies(), AUTO.name: AUTO}
    lightning_names = []
    for name in registry.known_names():
        # not names.get(name), which builds the strategy in Lightning's registries
        is_lightnings = name in names and not isinstance(names[name]["strategy"], LazyStrategy)
        if name in _RESERVED or (is_lightnings and not _takes_over(name, location)):
            lightning_names.append(name)
            continue
        names.register(
            name,
            LazyStrategy(name=name, front_end=location.front_end, instead=location.instead),
            description=infos[name].summary if name in infos else "can't be used as it is: see `fsdp list`",
            override=True,
        )
    names.available_strategies = partial(StrategyNames, names, module.__name__)
    for name in lightning_names:
        _warn_of_claims(name, module)


def _takes_over(name: str, location: _RegistryLocation) -> bool:
    """Whether a name of Lightning's becomes ours: that of fsdp-xla, where it is installed."""
    return (
        name == TAKEN_OVER
        and location.instead is None
        and any(provider.canonical_name == registry.FIRST_PARTY[name] for provider in registry.claimants(name))
    )


def _warn_of_claims(name: str, module: ModuleType) -> None:
    for provider in registry.claimants(name):
        warn(
            f"the strategy {name!r} of {provider} is passed over: {module.__name__} has its own of that name.\n"
            f"To use it, have its authors choose another name; to be rid of this warning, type: "
            f"pip uninstall {provider.name}"
        )


class StrategyNames(list[str]):
    """A registry's names, as ``available_strategies()`` lists them; a misspelt one of ours raises our error.

    Lightning's connectors test whether the user's string is in this list, and say of any other that it is invalid.
    There is no public way to change that. So a test by a connector, which is recognised by the caller's name, does
    more than tell whether the name is in the list. All other tests get the plain result. A test by a connector

    - enters the names of packages that were installed after Lightning was imported;
    - raises :class:`~fsdp_core.UnknownStrategyError`, a ``ValueError`` like Lightning's own, for a name that neither we
      nor Lightning know and that looks more like one of ours;
    - raises for a strategy object of ours that is for another front end or another package.

    Checked on Lightning 2.6.6.

    Args:
        names: The names.
        module: The name of the Lightning module that they belong to.
    """

    def __init__(self, names: Iterable[str] = (), module: str = "") -> None:
        super().__init__(names)
        self._module = module

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        caller = sys._getframe(1).f_code.co_name
        if caller != _CONNECTORS_METHOD:
            return False
        if not isinstance(name, str):
            _refuse_elsewhere(name, self._module)
            return False
        if self._enter_late(name):
            return True
        if self._looks_like_ours(name):
            raise registry.unknown_strategy(name, self._lightning_names())
        return False

    def _enter_late(self, name: str) -> bool:
        """Enter names of packages that were installed after the registry was filled; whether ``name`` is one."""
        forget_if_outdated()
        module = sys.modules.get(self._module)
        if module is None or name not in registry.known_names():
            return False
        names = getattr(module, _LOCATIONS[self._module].attribute)
        _enter_names(names, module)
        return name in names

    def _looks_like_ours(self, name: str) -> bool:
        our_likeness, _ = registry.likeness(name, registry.known_names())
        lightning_likeness, _ = registry.likeness(name, self._lightning_names())
        return "fsdp" in name or (our_likeness >= registry.CUTOFF and our_likeness > lightning_likeness)

    def _lightning_names(self) -> Iterable[str]:
        return sorted(set(self) - set(registry.known_names()))
