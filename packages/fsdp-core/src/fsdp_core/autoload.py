"""Registers our strategy names with Lightning when Lightning is imported, so that scripts need not import fsdp-core.

torch calls :func:`install` at the end of ``import torch``, through its entry-point group ``torch.backends``.
Lightning imports torch before it fills its strategy registries, so the finder that :func:`install` adds sees
Lightning's strategy modules before they run, and registers the names right after.

``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables torch's group; ``import fsdp_core.lightning`` then does the same by hand.

Every ``import torch`` imports this file, so it imports only ``sys`` until Lightning is imported.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # instead of `from typing import`, which costs more than this whole module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["STRATEGY_MODULES", "install"]

STRATEGY_MODULES = (
    "lightning.fabric.strategies",
    "lightning.pytorch.strategies",
    "lightning_fabric.strategies",
    "pytorch_lightning.strategies",
)
"""The modules whose registries get our names."""

_REGISTRATION = "fsdp_core.lightning.registration.entries"
"""The module that fills the registries, by name: it is imported when one of :data:`STRATEGY_MODULES` has run."""


def install() -> None:
    """Register our names with Lightning: at once if its strategy modules are imported, otherwise on their import.

    Idempotent. Never raises, because torch turns an error here into a failed ``import torch``: a fault is reported as
    one warning.
    """
    try:
        if not any(isinstance(finder, _StrategyModuleFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _StrategyModuleFinder())
        for name in STRATEGY_MODULES:
            module = sys.modules.get(name)
            # A module that is still executing gets the names when it has finished, from the loader below.
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                _enter_names(name, module)
    except Exception as error:
        from fsdp_core.errors import warn

        warn(f"fsdp-core could not watch for Lightning: {type(error).__name__}: {error}")


class _StrategyModuleFinder:
    """Finds Lightning's strategy modules through the other finders, and registers our names after they have run.

    It stays on ``sys.meta_path``, so that a reloaded registry gets the names again. For any other module it costs one
    tuple lookup.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in STRATEGY_MODULES:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if find_spec is None or isinstance(finder, _StrategyModuleFinder):
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _EnteringLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _EnteringLoader:
    """Replaces a module's loader until the module has run, then restores the original."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # As importlib.util.LazyLoader does: from here on the module refers to its own loader only.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _enter_names(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # looked up before __init__ when copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


_being_entered: set[str] = set()


def _enter_names(name: str, module: ModuleType) -> None:
    """Register our names in ``module``'s registry. A fault of ours must not break the import of Lightning."""
    if name in _being_entered:  # importing fsdp_core.lightning calls install() again
        return
    _being_entered.add(name)
    try:
        from importlib import import_module

        import_module(_REGISTRATION).enter(module)
    except Exception as error:
        from fsdp_core.errors import warn_of_fault

        warn_of_fault(name, error)
    finally:
        _being_entered.discard(name)
