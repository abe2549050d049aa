"""The strategies and options that are worth a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy as TrainerStrategy
from torch import nn

from fsdp_core.device_names import ANY_ACCELERATOR
from fsdp_core.errors import BrokenStrategyError, ShardingError, first_line
from fsdp_core.plugins import registry
from fsdp_core.plugins.auto_info import AUTO
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import StrategyInfo
from fsdp_core.sharding.units.wrap_policy import repeated_blocks

__all__ = ["Candidate", "candidate_of", "candidates_for", "check_rehearsable", "option_that_keeps_gathered"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with options.

    Attributes:
        strategy: Its name.
        options: Its options, as the constructor's keywords.
        ranks: The number of ranks.
        as_written: The strategy object that the script has built; ``None`` for a strategy by name.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    as_written: TrainerStrategy | FabricStrategy | None = None

    @property
    def code(self) -> str:
        """What to write in a script.

        Example:
            >>> Candidate(strategy="ddp", ranks=2).code
            'strategy="ddp"'
        """
        if self.as_written is not None:
            return f"{type(self.as_written).__name__}(...), as in the script"
        if not self.options:
            return f'strategy="{self.strategy}"'
        class_name = str(registry.describe(self.strategy).trainer).partition(":")[2]
        return f"{class_name}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def build(self, adapter: Literal["trainer", "fabric"] = "trainer") -> Any:
        """The strategy, as the Trainer or Fabric takes it.

        Args:
            adapter: Which of them.
        """
        if self.as_written is not None:
            return self.as_written
        if not self.options:
            return self.strategy
        return registry.resolve(self.strategy, adapter)(**self.options)


def candidates_for(
    ranks: int, module: nn.Module, script_strategy: object = None
) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates for a number of ranks.

    Args:
        ranks: The number of devices.
        module: What is trained. Activations are recomputed block by block, if it repeats blocks.
        script_strategy: The ``strategy`` that the script gives its Trainer or Fabric.

    Returns:
        The candidates, and the installed strategies that can't be rehearsed, with why.
    """
    candidates = [Candidate(strategy="auto")]
    refused = {plugin.name: str(plugin) for plugin in registry.broken()}
    if isinstance(script_strategy, TrainerStrategy | FabricStrategy) and not _chooses(script_strategy):
        name = str(getattr(script_strategy, "strategy_name", type(script_strategy).__name__))
        candidates.append(Candidate(strategy=name, ranks=ranks, as_written=script_strategy))
    if ranks == 1:
        return candidates, {}
    candidates.append(Candidate(strategy="ddp", ranks=ranks))
    has_blocks = bool(repeated_blocks(module))
    for info in _distinct_strategies():
        why = why_not_rehearsed(info)
        if why is None:
            option_sets = _option_sets(info, has_blocks)
            candidates += [Candidate(strategy=info.name, options=options, ranks=ranks) for options in option_sets]
        else:
            refused[info.name] = why
    return candidates, refused


def _chooses(script_strategy: object) -> bool:
    """Whether a strategy is the one that chooses another by a rehearsal: it is none itself."""
    return getattr(script_strategy, "strategy_name", None) == AUTO.name


def _distinct_strategies() -> list[StrategyInfo]:
    """The installed strategies, without those that are others of the same package under another name.

    Such a name has presets, or takes another library's options as well.
    """
    infos = [info for info in registry.strategies().values() if info.trainer is not None and not info.presets]

    def is_another(info: StrategyInfo, other: StrategyInfo) -> bool:
        has_more = {option.name for option in other.options} < {option.name for option in info.options}
        same_package = registry.provider(other.name).name == registry.provider(info.name).name
        return has_more and same_package and other.capabilities == info.capabilities

    return [info for info in infos if not any(is_another(info, other) for other in infos)]


def why_not_rehearsed(info: StrategyInfo) -> str | None:
    """Why a strategy is not rehearsed; ``None`` if it is.

    Args:
        info: The strategy.
    """
    if ANY_ACCELERATOR not in info.accelerators and "cpu" not in info.accelerators:
        return "it records what it computes for a compiler, which a rehearsal does not run"
    try:
        return registry.unavailable(info.name)
    except BrokenStrategyError as error:  # its probe has failed
        return first_line(error)


def _option_sets(info: StrategyInfo, has_blocks: bool) -> list[dict[str, Any]]:
    """Options worth a rehearsal: gathered parameters kept for the backward pass; none kept; activations recomputed."""
    keeps = option_that_keeps_gathered(info)
    sets: list[dict[str, Any]] = [{}]
    if keeps:
        sets.insert(0, keeps)
    if has_blocks and Capability.ACTIVATION_CHECKPOINTING in info.capabilities:
        sets += [{"activation_checkpointing_policy": "every_2"}, {"activation_checkpointing_policy": "every_1"}]
    return sets


def option_that_keeps_gathered(info: StrategyInfo) -> dict[str, Any]:
    """The option by which units stay gathered between forward and backward pass; empty if a strategy has none.

    Args:
        info: The strategy.
    """
    names = {option.name for option in info.options}
    if Capability.RESHARD_AFTER_FORWARD in info.capabilities:
        if "reshard_after_forward" in names:
            return {"reshard_after_forward": False}
        if "sharding_strategy" in names:
            return {"sharding_strategy": "SHARD_GRAD_OP"}
    return {}


def candidate_of(script_strategy: object, name: str | None, ranks: int) -> Candidate:
    """The strategy of that name, or else that of a script.

    Args:
        script_strategy: The ``strategy`` that the script gives its Trainer or Fabric.
        name: The name; ``None`` for the script's own.
        ranks: The number of ranks.

    Raises:
        ShardingError: The script's own is none that shards, or can't be rehearsed.
    """
    if name is None and isinstance(script_strategy, TrainerStrategy | FabricStrategy) and not _chooses(script_strategy):
        label = str(getattr(script_strategy, "strategy_name", type(script_strategy).__name__))
        return Candidate(strategy=label, ranks=ranks, as_written=script_strategy)
    if name is None and isinstance(script_strategy, str) and script_strategy.lower() in registry.strategies():
        name = script_strategy
        check_rehearsable(name)
    if name is None:
        raise ShardingError(
            f"the script has strategy={script_strategy!r}, which shards nothing by this project.\n"
            f"Choose one: --strategy NAME, of {', '.join(registry.strategies())}."
        )
    return Candidate(strategy=name, ranks=ranks)


def check_rehearsable(name: str) -> None:
    """Refuse a strategy that is not installed, or that can't be rehearsed.

    Args:
        name: Its name.

    Raises:
        UnknownStrategyError: No strategy has this name.
        ShardingError: It can't be rehearsed.
    """
    reason = why_not_rehearsed(registry.describe(name))
    if reason is not None:
        raise ShardingError(
            f"--strategy {name} can't be rehearsed: {reason}.\nChoose another of those that fsdp list shows."
        )
