"""The error for an option that a strategy lacks, in the place of Python's ``TypeError``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from fsdp_core import registry
from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["refuse_unknown_options"]


def refuse_unknown_options(
    strategy: str,
    made: type,
    unknown: Mapping[str, object],
    translations: Mapping[str, str],
    further: tuple[str, ...] = (),
) -> None:
    """Refuse what a strategy's constructor was given beyond its own options.

    Args:
        strategy: The name that users type.
        made: The strategy's class, whose constructor names its options.
        unknown: What it was given besides.
        translations: What to write in the place of options that other libraries have.
        further: Options that it takes beyond those that it names.

    Raises:
        UnsupportedCapabilityError: There is any; the message names the nearest option and the strategies that have it.
    """
    info = registry.strategies().get(strategy)
    foreign = "precision" if hasattr(made, "precision_plugin") else "precision_plugin"  # the other front end's
    listed = [] if info is None else [option.name for option in info.options if option.name != foreign]
    for name in unknown:
        named = inspect.signature(made).parameters.values()
        options = [one.name for one in named if one.kind is not one.VAR_KEYWORD]
        options = list(dict.fromkeys([*options, *further, *listed]))
        likeness, nearest = registry.likeness(name, options)
        others = [i.name for i in registry.strategies().values() if name in {option.name for option in i.options}]
        raise UnsupportedCapabilityError(
            f"strategy {strategy!r} has no option {name!r}."
            + (f" Did you mean {nearest!r}?" if likeness >= registry.CUTOFF else "")
            + (f" It is one of: {', '.join(others)}." if others else "")
            + (f" {translations[name]}" if name in translations else "")
            + f"\nIts options are {', '.join(options)}; `fsdp describe {strategy}` explains them."
        )
