"""Sharded training by name: what strategies there are, and what every backend of them shares.

Importing this package is cheap: each public name below is imported on first use, and only
:class:`AccumulatedGradients`, :class:`Backend`, :class:`RandomState`, :class:`Runtime`, :class:`SentWeights`,
:class:`Sharded`, :func:`full_state_dict`, :func:`gather_sequence`, :func:`gathered`, :func:`load_state_dict`,
:func:`sequence_positions`, :func:`shift_labels`, :func:`stream_weights`, :func:`token_mean` and :func:`wrap` import
torch.

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

TYPE_CHECKING = False  # instead of `from typing import`: every `import torch` imports this file
if TYPE_CHECKING:
    from fsdp_core.checkpoint import load_state_dict
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
        NonFiniteGradientError,
        OptimizerMismatchError,
        ShardingError,
        StrategyInfoError,
        StrategyNotInstalledError,
        StrategyUnavailableError,
        UnknownStrategyError,
        UnsupportedCapabilityError,
    )
    from fsdp_core.initialization.wrap import wrap
    from fsdp_core.lightning.checkpoints.begun_accumulation import AccumulatedGradients
    from fsdp_core.lightning.outside_steps.exporting import full_state_dict
    from fsdp_core.lightning.outside_steps.gathered import gathered
    from fsdp_core.lightning.outside_steps.weight_stream import SentWeights, stream_weights
    from fsdp_core.plugins.capabilities import Capability
    from fsdp_core.plugins.contract import CONTRACT_VERSION
    from fsdp_core.plugins.hookspecs import hookimpl
    from fsdp_core.plugins.registry import describe, resolve, strategies
    from fsdp_core.plugins.strategy_info import Option, StrategyInfo
    from fsdp_core.runtime import ProcessGroupRuntime, ReduceOp, Runtime
    from fsdp_core.sharding.backend import Backend
    from fsdp_core.sharding.sequence import gather_sequence, sequence_positions, shift_labels
    from fsdp_core.sharding.sharded import Sharded
    from fsdp_core.sharding.token_mean import token_mean
    from fsdp_core.state.random_state import RandomState

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
    "NonFiniteGradientError",
    "OptimizerMismatchError",
    "Option",
    "ProcessGroupRuntime",
    "RandomState",
    "ReduceOp",
    "Runtime",
    "SentWeights",
    "Sharded",
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
    "gather_sequence",
    "gathered",
    "hookimpl",
    "load_state_dict",
    "resolve",
    "sequence_positions",
    "shift_labels",
    "strategies",
    "stream_weights",
    "token_mean",
    "wrap",
]

_HOMES = {
    "CONTRACT_VERSION": "plugins.contract",
    "AccumulatedGradients": "lightning.checkpoints.begun_accumulation",
    "Backend": "sharding.backend",
    "Capability": "plugins.capabilities",
    "Option": "plugins.strategy_info",
    "ProcessGroupRuntime": "runtime",
    "RandomState": "state.random_state",
    "ReduceOp": "runtime",
    "Runtime": "runtime",
    "SentWeights": "lightning.outside_steps.weight_stream",
    "Sharded": "sharding.sharded",
    "StrategyInfo": "plugins.strategy_info",
    "describe": "plugins.registry",
    "full_state_dict": "lightning.outside_steps.exporting",
    "gather_sequence": "sharding.sequence",
    "gathered": "lightning.outside_steps.gathered",
    "hookimpl": "plugins.hookspecs",
    "load_state_dict": "checkpoint",
    "resolve": "plugins.registry",
    "sequence_positions": "sharding.sequence",
    "shift_labels": "sharding.sequence",
    "strategies": "plugins.registry",
    "stream_weights": "lightning.outside_steps.weight_stream",
    "token_mean": "sharding.token_mean",
    "wrap": "initialization.wrap",
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
