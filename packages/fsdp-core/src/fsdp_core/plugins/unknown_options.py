"""The error for an option that a strategy lacks, instead of Python's ``TypeError``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.plugins import registry

__all__ = ["refuse_unknown_options"]


def refuse_unknown_options(
    strategy: str,
    strategy_class: type,
    unknown: Mapping[str, object],
    translations: Mapping[str, str],
    unlisted: tuple[str, ...] = (),
    accepted: Mapping[str, Collection[object]] | None = None,
) -> None:
    """Refuse the unknown options that a strategy's constructor was passed, all in one error.

    Args:
        strategy: The name that users type.
        strategy_class: The strategy's class, whose constructor names its options.
        unknown: The unknown options, with their values.
        translations: By other libraries' options, what to write instead.
        unlisted: Options that the constructor takes without naming them.
        accepted: By other libraries' options, the values that ask for what this strategy does anyway.

    Raises:
        UnsupportedCapabilityError: There are any; the message names the nearest option and the strategies that have it.
    """
    info = registry.strategies().get(strategy)
    # an option of the other front end's class alone
    other_precision_option = "precision" if hasattr(strategy_class, "precision_plugin") else "precision_plugin"
    listed = [] if info is None else [option.name for option in info.options if option.name != other_precision_option]
    parameters = inspect.signature(strategy_class).parameters.values()
    options = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    options = list(dict.fromkeys([*options, *unlisted, *listed]))
    refused = {
        name: _instead(name, options, translations, strategy_class.__name__ if name in listed else None)
        for name, value in unknown.items()
        if not any(getattr(value, "name", value) == noop for noop in (accepted or {}).get(name, ()))
    }
    if not refused:
        return
    names = ", ".join(map(repr, refused))
    description = f" {names}.{next(iter(refused.values()))}"
    if len(refused) > 1:
        description = f"s {names}." + "".join(f"\n{name}:{instead}" for name, instead in refused.items())
    raise UnsupportedCapabilityError(
        f"strategy {strategy!r} has no option{description}\n"
        f"Its options are {', '.join(options)}; `fsdp describe {strategy}` explains them."
    )


def _instead(name: str, options: Sequence[str], translations: Mapping[str, str], subclass: str | None) -> str:
    """What to write instead of an option, with a leading space; empty if unknown.

    Args:
        name: The option.
        options: Those that there are.
        translations: By other libraries' options, what to write instead.
        subclass: The class that does not take it, if its strategy does.
    """
    if subclass is not None:
        return (
            f" The strategy has it, and the constructor of {subclass} does not pass it on: let that take **options, "
            "and give them to super().__init__()."
        )
    likeness, nearest = registry.likeness(name, options)
    owners = [info.name for info in registry.strategies().values() if name in {option.name for option in info.options}]
    of_owners = f" It is one of: {', '.join(owners)}." if owners else ""
    if name in translations:
        return f"{of_owners} {translations[name]}"
    question = f" Did you mean {nearest!r}?" if likeness >= registry.CUTOFF else ""
    return question + of_owners
