"""The signature of a strategy's constructor, including the options that it passes on to the next one."""

from __future__ import annotations

import inspect
from collections.abc import Container

from fsdp_core.plugins.option_discovery import explained

__all__ = ["BY_THE_PACKAGE", "described_constructor"]

#: Arguments of core's constructors that packages pass, and users don't.
BY_THE_PACKAGE = ("backend", "strategy_name", "runtime")


def described_constructor(cls: type) -> tuple[inspect.Signature, str | None]:
    r"""The signature of a class's constructor and the class's docstring, both with the options that it passes on.

    A constructor that takes ``*common`` passes on what it does not name to the next one. Such a constructor may take
    positional options before ``*common``; the front end's come first.

    Args:
        cls: The class.

    Example:
        >>> class Adapter:
        ...     '''Runs.
        ...
        ...     Args:
        ...         backend: How.
        ...         timeout: How long it waits.
        ...     '''
        ...     def __init__(self, backend, timeout=None, *, strategy_name): ...
        >>> class Options:
        ...     '''What is mine.
        ...
        ...     Args:
        ...         size: How large it is.
        ...     '''
        ...     def __init__(self, *common, size=2, **others):
        ...         super().__init__(size, *common, strategy_name="mine", **others)
        >>> class Mine(Options, Adapter):
        ...     '''Runs mine.'''
        >>> signature, docstring = described_constructor(Mine)
        >>> print(f"{signature}\n{docstring}")
        (timeout=None, *, size=2)
        Runs mine.
        <BLANKLINE>
        Args:
            timeout: How long it waits.
            size: How large it is.
    """
    kinds = inspect.Parameter
    parameters: dict[str, inspect.Parameter] = {}
    told: dict[str, str] = {}
    passed_on, passes_on, by_position = False, True, True
    for one in cls.__mro__:
        told = {**explained(one.__doc__), **told}
        constructor = vars(one).get("__init__")
        if constructor is None or not passes_on:
            continue
        own = list(inspect.signature(constructor).parameters.values())[1:]
        passes_on = any(each.kind is kinds.VAR_POSITIONAL for each in own)
        begun = False
        for each in own:
            named = each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
            if each.name in parameters:
                by_position = by_position and not begun  # those behind it are behind one that is passed by keyword
            elif (named or not passes_on) and not (passed_on and _is_hidden(each.name, parameters)):
                begun = begun or named
                behind = each.kind is kinds.POSITIONAL_OR_KEYWORD and not by_position
                parameters[each.name] = each.replace(kind=kinds.KEYWORD_ONLY) if behind else each
        passed_on = True
    # the next constructor's positional parameters come first, since *common passes them on
    docstring = vars(cls).get("__doc__")
    try:
        signature = inspect.Signature(sorted(parameters.values(), key=lambda each: each.kind))
    except ValueError:  # a required parameter after optional ones, which no combined signature can show
        return inspect.Signature(list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]), docstring
    lines = [f"    {name}: {told[name]}" for name in signature.parameters if name in told]
    if not isinstance(docstring, str) or explained(docstring) or not lines:
        return signature, docstring
    summary, *rest = inspect.cleandoc(docstring).split("\n\nExample:")
    return signature, "\n\nExample:".join(["\n".join([f"{summary}\n\nArgs:", *lines]), *rest])


def _is_hidden(name: str, named: Container[str]) -> bool:
    """Whether an inner constructor's parameter is one that users don't give, or give under the front end's name."""
    return name in BY_THE_PACKAGE or (name == "precision" and "precision_plugin" in named)
