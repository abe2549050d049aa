"""The two Lightning front ends. Importing this package enters our strategy names in Lightning by hand.

Nobody needs that as long as torch loads its ``torch.backends`` entry points (see :mod:`fsdp_core.autoload`); where
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns those off, a script says ``import fsdp_core.lightning``, before or after it
imports Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_core.autoload import install

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric import ShardedFabricStrategy
    from fsdp_core.lightning.trainer import ShardedTrainerStrategy

__all__ = ["ShardedFabricStrategy", "ShardedTrainerStrategy"]

_HOMES = {
    "ShardedFabricStrategy": "fsdp_core.lightning.fabric",
    "ShardedTrainerStrategy": "fsdp_core.lightning.trainer",
}

install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
