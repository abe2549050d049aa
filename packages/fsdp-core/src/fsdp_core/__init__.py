"""Sharded training by name: what strategies there are, and what every backend of them shares.

Importing this package costs next to nothing: each public name below is imported when it is first used, and only
:class:`AccumulatedGradients`, :class:`Backend`, :class:`RandomState`, :class:`Runtime`, :func:`full_state_dict`,
:func:`gathered`, :func:`load_state_dict` and :func:`wrap` import torch.

Example:
    >>> import fsdp_core
    >>> info = fsdp_core.StrategyInfo(name="mine", summary="", trainer="mine.trainer:Mine", accelerators=("cpu",))
    >>> fsdp_core.resolve("no_such_strategy", "trainer")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fsdp_core.errors.UnknownStrategyError: no strategy named 'no_such_strategy'.
    ...
"""

from __future__ import annotations

TYPE_CHECKING = False  # instead of `from typing import`: this file is on the way of every `import torch`
if TYPE_CHECKING:
    from fsdp_core.accumulated_gradients import AccumulatedGradients
    from fsdp_core.backend import Backend
    from fsdp_core.checkpoint import load_state_dict
    from fsdp_core.contract import CONTRACT_VERSION
    from fsdp_core.errors import (
        BrokenStrategyError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointFormatError,
        CheckpointMismatchError,
        CheckpointValueError,
        ContractVersionError,
        DuplicateStrategyError,
        FSDPError,
        MissingKeyError,
        OptimizerMismatchError,
        ShardingError,
        StrategyInfoError,
        StrategyNotInstalledError,
        StrategyUnavailableError,
        UnknownStrategyError,
        UnsupportedCapabilityError,
    )
    from fsdp_core.hookspecs import hookimpl
    from fsdp_core.lightning.exporting import full_state_dict
    from fsdp_core.lightning.gathered import gathered
    from fsdp_core.marking import wrap
    from fsdp_core.random_state import RandomState
    from fsdp_core.registry import describe, resolve, strategies
    from fsdp_core.runtime import Runtime
    from fsdp_core.strategy_info import Capability, Option, StrategyInfo

    __version__: str

__all__ = [
    "CONTRACT_VERSION",
    "AccumulatedGradients",
    "Backend",
    "BrokenStrategyError",
    "Capability",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointValueError",
    "ContractVersionError",
    "DuplicateStrategyError",
    "FSDPError",
    "MissingKeyError",
    "OptimizerMismatchError",
    "Option",
    "RandomState",
    "Runtime",
    "ShardingError",
    "StrategyInfo",
    "StrategyInfoError",
    "StrategyNotInstalledError",
    "StrategyUnavailableError",
    "UnknownStrategyError",
    "UnsupportedCapabilityError",
    "__version__",
    "describe",
    "full_state_dict",
    "gathered",
    "hookimpl",
    "load_state_dict",
    "resolve",
    "strategies",
    "wrap",
]

_HOMES = {
    "CONTRACT_VERSION": "contract",
    "AccumulatedGradients": "accumulated_gradients",
    "Backend": "backend",
    "Capability": "strategy_info",
    "Option": "strategy_info",
    "RandomState": "random_state",
    "Runtime": "runtime",
    "StrategyInfo": "strategy_info",
    "describe": "registry",
    "full_state_dict": "lightning.exporting",
    "gathered": "lightning.gathered",
    "hookimpl": "hookspecs",
    "load_state_dict": "checkpoint",
    "resolve": "registry",
    "strategies": "registry",
    "wrap": "marking",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("fsdp-core")
    else:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
