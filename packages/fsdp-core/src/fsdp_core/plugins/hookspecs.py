"""The one hook that a plugin implements.

A plugin is a module named by an entry point in the group ``fsdp.strategies``; by convention the entry point has the
plugin's main strategy name::

    # pyproject.toml
    [project.entry-points."fsdp.strategies"]
    my_fsdp = "my_fsdp.plugin"

    # my_fsdp/plugin.py, which imports neither torch nor Lightning
    from fsdp_core import StrategyInfo, hookimpl

    @hookimpl
    def fsdp_strategies():
        return [StrategyInfo(name="my_fsdp", summary="…", trainer="my_fsdp.trainer:MyStrategy", accelerators=("cpu",))]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fsdp_core.plugins.strategy_info import StrategyInfo

__all__ = ["ENTRY_POINT_GROUP", "PROJECT", "fsdp_strategies", "hookimpl", "hookspec"]

PROJECT = "fsdp"
ENTRY_POINT_GROUP = "fsdp.strategies"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def fsdp_strategies() -> Iterable[StrategyInfo]:  # type: ignore[empty-body]
    """Return the strategies that this plugin provides.

    Called once per process, when a name is first listed or looked up. Must import neither torch nor Lightning.

    Returns:
        One :class:`~fsdp_core.StrategyInfo` per strategy name.
    """
