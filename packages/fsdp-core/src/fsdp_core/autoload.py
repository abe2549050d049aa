"""Enters our strategy names in Lightning when Lightning is imported, so that a script needs no import of ours.

torch calls :func:`install` at the end of ``import torch``, through its own entry-point group ``torch.backends``, and
Lightning imports torch before it fills its registries of strategies. So a finder placed by :func:`install` sees
Lightning's strategy modules before they run, and enters the names right after.

``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns torch's group off; ``import fsdp_core.lightning`` then does the same by hand.

This file is on the way of every ``import torch``: it imports nothing but ``sys`` until Lightning comes.
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
"""The modules whose registries get our names; :mod:`fsdp_core.lightning.registration.entries` knows the registries."""


def install() -> None:
    """Have our names entered in Lightning's registries: those of today at once, those to come when they are imported.

    Idempotent. Never raises, because torch turns an error here into a failed ``import torch``: a fault becomes one
    warning.
    """
    try:
        if not any(isinstance(finder, _StrategyModuleFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _StrategyModuleFinder())
        for name in STRATEGY_MODULES:
            module = sys.modules.get(name)
            # One that is still running is entered when it is done, by the loader below.
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                _enter_names(name, module)
    except Exception as error:
        from fsdp_core.fault_warnings import warn

        warn(f"fsdp-core could not watch for Lightning: {type(error).__name__}: {error}")


class _StrategyModuleFinder:
    """Finds Lightning's strategy modules as the other finders do, and enters our names after they have run.

    It stays on ``sys.meta_path``, so that a reloaded registry gets the names again. For any other module it costs one
    look into a tuple.
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
    """Stands in for a module's loader until the module has run, then leaves no trace in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # As importlib.util.LazyLoader does: from here on the module knows its own loader only.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _enter_names(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # asked before __init__ when copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


_being_entered: set[str] = set()


def _enter_names(name: str, module: ModuleType) -> None:
    """Have our names entered in ``module``'s registry, and our folders and shards known to Lightning's own strategies.

    A fault of ours must not break the import of Lightning.
    """
    if name in _being_entered:  # importing fsdp_core.lightning calls install() again
        return
    _being_entered.add(name)
    try:
        from fsdp_core.lightning.checkpoints.patched_io import install_opening
        from fsdp_core.lightning.hooks.grad_norms import install_grad_norm
        from fsdp_core.lightning.registration.entries import enter
        from fsdp_core.lightning.registration.sharded_elsewhere import install_refusal

        install_opening(module)
        install_refusal(module)
        install_grad_norm()
        enter(module)
    except Exception as error:
        from fsdp_core.fault_warnings import warn_of_fault

        warn_of_fault(name, error)
    finally:
        _being_entered.discard(name)
