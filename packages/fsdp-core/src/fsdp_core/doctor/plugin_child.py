"""Loads one plugin, alone: ``python -m fsdp_core.doctor.plugin_child ANSWER NAME MODULE PACKAGE``."""

from __future__ import annotations

import sys
from typing import Any

from fsdp_core.doctor.child import END, answer_with
from fsdp_core.errors import BrokenStrategyError
from fsdp_core.plugins.availability import check_classes, why_unavailable
from fsdp_core.plugins.discovery import (
    BrokenPlugin,
    Claim,
    LoadedPlugin,
    error_text,
    installed_plugins,
    load_plugin,
    provider_of,
)
from fsdp_core.plugins.registry import is_kept

__all__ = ["main"]


def main(file: str, name: str, module: str, package: str) -> None:
    """Load the plugin, answer, check whether its strategies can run here, and answer again."""
    identity = (name, module, package)
    (entry_point, *_) = [
        item for item in installed_plugins() if (item.name, item.value, provider_of(item).name) == identity
    ]
    plugin = load_plugin(entry_point)
    strategies = [info.as_dict() for info in plugin.infos]
    answer_with(file, _facts(plugin, strategies))
    for row, info in zip(strategies, plugin.infos, strict=True):
        claim = Claim(info=info, provider=plugin.provider)
        try:
            check_classes(claim)
            reason = why_unavailable(claim)
            row |= {"status": "available" if reason is None else "unavailable", "reason": reason}
            if is_kept(info, plugin.provider):
                row |= {"status": "kept", "reason": "Lightning keeps this name for its own strategy"}
        except BrokenStrategyError as error:
            row |= {"status": "broken", "reason": str(error)}
    answer_with(file, _facts(plugin, strategies))
    print(END, file=sys.stderr, flush=True)


def _facts(plugin: LoadedPlugin, strategies: list[dict[str, Any]]) -> dict[str, Any]:
    broken = plugin.error and BrokenPlugin(name=plugin.name, provider=plugin.provider, error=plugin.error)
    return {
        "seconds": round(plugin.seconds, 3),
        "error": error_text(plugin.error) if plugin.error else None,
        "remedy": broken.remedy if broken else None,
        "complaints": [{"what": item.what, "remedy": item.remedy} for item in plugin.complaints],
        "strategies": strategies,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
