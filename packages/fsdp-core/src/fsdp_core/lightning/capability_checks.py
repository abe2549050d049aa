"""Refuses, for every strategy, what a user requests and the strategy does not declare."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import StrategyInfo
from fsdp_core.plugins.unknown_options import refuse_unknown_options
from fsdp_core.sharding.options import is_same_value
from fsdp_core.sharding.precision_strings import ShardPrecision

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

__all__ = [
    "StrategyCapabilities",
    "capability_of",
    "check_checkpoint",
    "check_loop",
    "check_materialization",
    "check_options",
    "check_precision",
    "require",
]

#: The capability that an option requests, by core's name of the option.
_CAPABILITY_OF_OPTION = {
    capability.option: capability for capability in Capability if capability.option not in (None, "state_dict_type")
}

_CHECKPOINTS = {"sharded": Capability.SHARDED_CHECKPOINT, "full": Capability.FULL_CHECKPOINT}


def require(strategy: str, capability: Capability, request: str, instead: str = "Leave it out") -> None:
    """Refuse what a strategy does not declare. A name that no plugin lists is let through.

    Args:
        strategy: The name that users type.
        capability: The capability that is needed.
        request: What the user requested, as it is written.
        instead: What to write with this strategy.

    Raises:
        UnsupportedCapabilityError: The strategy is listed, but does not declare it.
    """
    info = registry.strategies().get(strategy)
    if info is not None and capability not in info.capabilities:
        raise _refusal(info, capability, request, instead)


class StrategyCapabilities:
    """A base of every strategy's class: refuses what the strategy does not declare."""

    strategy_name: str

    def require(self, capability: Capability, request: str) -> None:
        """Raise :class:`~fsdp_core.errors.UnsupportedCapabilityError` if the strategy does not declare it."""
        require(self.strategy_name, capability, request)

    def _check_empty_init(self, empty_init: bool | None) -> None:
        if empty_init:
            self.require(Capability.META_INIT, "empty_init=True")


def capability_of(option: str, value: Any) -> Capability | None:
    """The capability that an option requests, by core's name of the option.

    Example:
        >>> capability_of("cpu_offload", True), capability_of("state_dict_type", "full"), capability_of("timeout", None)
        (<Capability.CPU_OFFLOAD: 'cpu_offload'>, <Capability.FULL_CHECKPOINT: 'full_checkpoint'>, None)
    """
    if option == "state_dict_type":
        return _CHECKPOINTS.get(value) if isinstance(value, str) else None
    return _CAPABILITY_OF_OPTION.get(option)


def check_options(cls: type, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse options that request what a strategy does not declare, even if its constructor does not take them.

    Args:
        cls: The strategy's class, or a subclass of it.
        arguments: The positional arguments.
        options: The keyword arguments.

    Raises:
        UnsupportedCapabilityError: There is such an option, or the constructor takes no option of this name.
    """
    listed_class_and_info = _find_listed_class(cls)
    if listed_class_and_info is None:
        return
    listed_class, info = listed_class_and_info
    option_names, takes_any_option = _options_of_constructor(cls, listed_class)
    arguments_by_name = {**dict(zip(option_names, arguments, strict=False)), **options}
    defaults = {option.name: option.default for option in info.options}
    refused: dict[str, str] = {}
    for name, value in arguments_by_name.items():
        capability = capability_of(name, value)
        if capability is None or capability in info.capabilities:
            continue
        is_default = name in defaults and is_same_value(value, defaults[name])
        if not is_default:  # a default requests nothing
            refused[name] = str(_refusal(info, capability, f"{name}={_describe_value(value)}", "Leave it out"))
    if refused:
        messages = list(refused.values())
        # all errors are reported at once: the constructor is called without the refused options to find further ones
        can_leave_out = refused.keys() <= options.keys()
        if can_leave_out:
            try:
                cls(*arguments, **{name: value for name, value in options.items() if name not in refused})
            except UnsupportedCapabilityError as error:
                messages.append(str(error))
        raise UnsupportedCapabilityError("\n".join(messages))
    unknown = [name for name in options if name not in option_names]
    if unknown and not takes_any_option:
        refuse_unknown_options(info.name, cls, dict.fromkeys(unknown), {})


def check_precision(strategy: str, precision: ShardPrecision) -> None:
    """Refuse mixed precision, or a precision with a gradient scaler, if the strategy does not declare it.

    Args:
        strategy: The name that users type.
        precision: The requested precision.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
    """
    request = f"precision={precision.name!r}"
    instead = "Write precision='32-true'"
    if precision.compute not in (None, precision.storage):
        require(strategy, Capability.MIXED_PRECISION, request, instead)
    if precision.scaled:
        require(strategy, Capability.GRADIENT_SCALING, request, instead)


def check_checkpoint(strategy: str, layout: str, request: str) -> None:
    """Refuse a kind of checkpoint that the strategy does not declare.

    Args:
        strategy: The name that users type.
        layout: ``"sharded"`` or ``"full"``.
        request: What the user requested.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
    """
    info = registry.strategies().get(strategy)
    other_layout = "full" if layout == "sharded" else "sharded"
    has_other = info is not None and _CHECKPOINTS[other_layout] in info.capabilities
    instead = f"Write state_dict_type={other_layout!r}" if has_other else "Leave it out"
    require(strategy, _CHECKPOINTS[layout], request, instead)


def check_loop(strategy: str, layout: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what a fit requests and the strategy does not declare, before training starts.

    Args:
        strategy: The name that users type.
        layout: The kind of its checkpoints, ``"sharded"`` or ``"full"``.
        trainer: The Trainer, whose arguments are checked.
        module: The module, which may use manual optimization.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
    """
    if trainer.accumulate_grad_batches != 1:
        request = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        require(strategy, Capability.GRADIENT_ACCUMULATION, request)
    if trainer.gradient_clip_val:
        clips_by_value = trainer.gradient_clip_algorithm == "value"
        algorithm = "value" if clips_by_value else "norm"  # which is Lightning's default for None
        request = f"gradient_clip_val={trainer.gradient_clip_val}, gradient_clip_algorithm={algorithm!r}"
        require(strategy, Capability.CLIP_BY_VALUE if clips_by_value else Capability.CLIP_BY_NORM, request)
    if not module.automatic_optimization:
        require(strategy, Capability.MANUAL_OPTIMIZATION, "automatic_optimization=False")
    if trainer.checkpoint_callbacks:
        callback = type(trainer.checkpoint_callbacks[0]).__name__
        check_checkpoint(
            strategy, layout, f"{callback} with state_dict_type={layout!r} (see also enable_checkpointing=False)"
        )


def check_materialization(strategy: str, module: nn.Module) -> None:
    """Refuse a module built on the meta device, if the strategy does not declare that.

    Args:
        strategy: The name that users type.
        module: The module that is about to be sharded.

    Raises:
        UnsupportedCapabilityError: The strategy does not declare it.
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        require(
            strategy,
            Capability.META_INIT,
            f"{type(module).__name__} with parameters on the meta device",
            "Build it with values, without empty_init=True",
        )


def _find_listed_class(cls: type) -> tuple[type, StrategyInfo] | None:
    """The class or first base that a plugin lists, and its description.

    If the class is listed under several names, the one with the fewest presets is taken.
    """
    infos = sorted(registry.strategies().values(), key=lambda info: len(info.presets))
    for base in cls.__mro__:
        for info in infos:
            if _is_named_by(info.trainer, base) or _is_named_by(info.fabric, base):
                return base, info
    return None


def _options_of_constructor(cls: type, listed_class: type) -> tuple[list[str], bool]:
    """The names of the options that a class takes, and whether its constructor accepts any other name.

    A subclass's constructor may name some options, and pass on the others as ``**options``. The listed class then
    refuses names that it does not know.
    """
    names: list[str] = []
    for base in cls.__mro__[: cls.__mro__.index(listed_class) + 1]:
        constructor = vars(base).get("__init__")
        if constructor is not None and not hasattr(constructor, "is_generated"):
            parameters = list(inspect.signature(constructor).parameters.values())[1:]
            named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
            names += [name for name in named if name not in names]
            has_var_keyword = len(named) < len(parameters)
            if not has_var_keyword:  # nothing is passed on to the listed class
                return names, False
    names_of_listed = inspect.signature(listed_class).parameters
    return list(dict.fromkeys([*names, *names_of_listed])), True


def _is_named_by(reference: str | None, cls: type) -> bool:
    """Whether a reference ``"module:attribute"`` names a class, which has been imported."""
    module, _, attribute = (reference or "").partition(":")
    named: Any = sys.modules.get(module)
    for part in attribute.split("."):
        named = getattr(named, part, None)
    return named is cls


def _describe_value(value: Any) -> str:
    if isinstance(value, (set, frozenset, list, tuple)):
        return "{" + ", ".join(_describe_value(element) for element in value) + "}"
    return str(getattr(value, "__name__", None) or repr(value))


def _refusal(info: StrategyInfo, capability: Capability, request: str, instead: str) -> UnsupportedCapabilityError:
    able_strategies = [other.name for other in registry.strategies().values() if capability in other.capabilities]
    other_strategies = "; no installed strategy has it."
    if able_strategies:
        other_strategies = f", or use a strategy that has it: {', '.join(able_strategies)}."
    return UnsupportedCapabilityError(
        f"strategy {info.name!r} can't do {request}: it does not declare the capability {str(capability)!r}.\n"
        f"{instead}{other_strategies}"
    )
