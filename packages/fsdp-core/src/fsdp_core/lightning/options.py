"""Lightning's own options, and a strategy's signature and docstring, which follow from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, Concatenate, ParamSpec, get_type_hints

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision

from fsdp_core.plugins.option_discovery import option_docs, read_descriptions
from fsdp_core.sharding.options import ShardingOptions, option_names

__all__ = ["LightningOptions", "describe_class", "signature_of", "strategy_options", "takes"]

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class LightningOptions:
    """What Lightning's own strategies take."""

    accelerator: Accelerator | None = None
    """A Lightning Accelerator; ``None``: Lightning chooses."""
    parallel_devices: list[torch.device] | None = None
    """The devices of this host; ``None``: Lightning chooses."""
    cluster_environment: ClusterEnvironment | None = None
    """A Lightning ClusterEnvironment; ``None``: Lightning chooses."""
    checkpoint_io: CheckpointIO | None = None
    """A Lightning CheckpointIO, which full checkpoints go through."""
    precision_plugin: Precision | None = None
    """Under Trainer: a Lightning Precision plugin. ``Trainer(precision="bf16-mixed")`` is the usual way."""
    precision: Precision | None = None
    """Under Fabric: a Lightning Precision plugin. ``Fabric(precision="bf16-mixed")`` is the usual way."""


def takes(
    options_class: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Tell type checkers which options a constructor takes. At run time they follow from the strategy's class.

    Args:
        options_class: The class of the strategy's options.
    """

    def keep(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        return constructor

    return keep


def strategy_options(options_class: type[ShardingOptions]) -> type[ShardingOptions]:
    """The class of what a strategy takes: its own options and Lightning's.

    Args:
        options_class: The class of its own options, which may have Lightning's already.
    """
    if issubclass(options_class, LightningOptions):
        return options_class
    bases = (options_class, LightningOptions)
    combined = make_dataclass(options_class.__name__, [], bases=bases, frozen=True, kw_only=True)
    combined.__module__, combined.__doc__ = options_class.__module__, options_class.__doc__
    return combined


def signature_of(cls: type, strategy: type) -> inspect.Signature:
    """The signature of a strategy's class: what its own constructor names, and the options that it passes on.

    Args:
        cls: The class, whose attributes say which options it takes.
        strategy: The base that all strategies have; what is above it in the MRO is Lightning's.
    """
    own_parameters: dict[str, inspect.Parameter] = {}
    outermost: list[inspect.Parameter] = []  # of the first class in the MRO that has a constructor
    takes_positional = True  # whether all constructors pass on *args
    for base in cls.__mro__[: cls.__mro__.index(strategy)]:
        constructor = vars(base).get("__init__")
        if constructor is None or hasattr(constructor, "is_generated"):
            continue
        parameters = list(inspect.signature(constructor, follow_wrapped=False).parameters.values())[1:]
        outermost = outermost or parameters
        kinds = {parameter.kind for parameter in parameters}
        for parameter in parameters:
            if parameter.kind not in _VARIABLE:
                own_parameters.setdefault(parameter.name, parameter)
        takes_positional = takes_positional and inspect.Parameter.VAR_POSITIONAL in kinds
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return inspect.Signature(list(own_parameters.values()))
    options = [option for option in _options(cls, takes_positional) if option.name not in own_parameters]
    try:
        # positional parameters come before those that are given by keyword alone
        in_order = sorted([*own_parameters.values(), *options], key=lambda parameter: parameter.kind)
        return inspect.Signature(in_order)
    except ValueError:  # a required parameter after optional ones, which no signature can show
        return inspect.Signature(outermost)


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _options(cls: Any, takes_positional: bool) -> list[inspect.Parameter]:
    options_class: type[ShardingOptions] = cls.options_class
    try:
        hints = get_type_hints(options_class)
    except NameError:  # a type that is imported for type checkers alone
        hints = {option.name: option.type for option in fields(options_class)}
    defaults = {option.name: option.default for option in fields(options_class)}
    positional_names = cls.positional if takes_positional else ()
    names = [*cls.positional, *(name for name in option_names(options_class) if name not in cls.positional)]
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if name in positional_names else inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=hints[name],
        )
        for name in names
        if name not in cls.left_out
    ]


def describe_class(cls: type, options_class: type[ShardingOptions], names: Collection[str]) -> str | None:
    """A strategy's docstring, with what its constructor takes under ``Args``.

    Args:
        cls: The class. Its own docstring is left as it is if it explains its arguments.
        options_class: The class of its options.
        names: What its constructor takes.
    """
    docstring = vars(cls).get("__doc__")
    texts = {name: text for base in reversed(options_class.__mro__) for name, text in option_docs(base).items()}
    for base in reversed(cls.__mro__):
        if hasattr(base, "options_class"):
            texts.update(read_descriptions(vars(base).get("__doc__")))
    lines = [f"    {name}: {texts[name]}" for name in names if name in texts]
    if not isinstance(docstring, str) or read_descriptions(docstring) or not lines:
        return docstring
    summary, *examples = inspect.cleandoc(docstring).split("\n\nExample:")
    return "\n\nExample:".join(["\n".join([f"{summary}\n\nArgs:", *lines]), *examples])
