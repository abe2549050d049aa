"""What plugins provide: strategies by name, how they are found, and what is known of each without importing torch."""

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.contract import CONTRACT_VERSION
from fsdp_core.plugins.hookspecs import ENTRY_POINT_GROUP, fsdp_strategies, hookimpl
from fsdp_core.plugins.option_discovery import options_in
from fsdp_core.plugins.registry import describe, resolve, strategies
from fsdp_core.plugins.strategy_info import FrontEnd, Option, Plain, StrategyInfo
from fsdp_core.plugins.unknown_options import refuse_unknown_options

__all__ = [
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "Capability",
    "FrontEnd",
    "Option",
    "Plain",
    "StrategyInfo",
    "describe",
    "fsdp_strategies",
    "hookimpl",
    "options_in",
    "refuse_unknown_options",
    "resolve",
    "strategies",
]
