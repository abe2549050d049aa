"""Looks for our names in Lightning's registries, as a user's script would: ``… lightning_child ANSWER``."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from time import perf_counter
from typing import Any

from fsdp_core.doctor.child import answer_with
from fsdp_core.plugins.discovery import error_text

__all__ = ["main"]

_REGISTRIES = {"trainer": "lightning.pytorch.strategies", "fabric": "lightning.fabric.strategies"}


def main(file: str) -> None:
    """Import Lightning, and list the names in its registries."""
    facts: dict[str, Any] = {"error": None, "warnings": []}
    began = perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            modules = {front_end: import_module(name) for front_end, name in _REGISTRIES.items()}
            facts["seconds"] = round(perf_counter() - began, 3)
            for front_end, module in modules.items():
                facts[front_end] = _names(module)
        messages = [str(item.message) for item in caught]
        facts["warnings"] = [text for text in messages if text.startswith(("fsdp-core ", "the strategy "))]
    except BaseException as error:  # whatever it is, it is the finding
        facts["error"] = error_text(error)
    answer_with(file, {**facts, "done": True})


def _names(module: Any) -> dict[str, list[str]]:
    """Which names of a registry are ours, and which are Lightning's own."""
    names = getattr(module, "StrategyRegistry", None) or module.STRATEGY_REGISTRY
    ours = [
        name for name in names if type(names[name]["strategy"]).__module__ == "fsdp_core.lightning.registration.entries"
    ]
    return {"ours": sorted(ours), "lightnings": sorted(set(names) - set(ours))}


if __name__ == "__main__":
    main(*sys.argv[1:])
