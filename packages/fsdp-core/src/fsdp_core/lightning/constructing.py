"""What a strategy's class takes: its options by name and by position, and the signature that follows from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.features.finite_gradients import check_error_if_nonfinite
from fsdp_core.lightning.options import describe_class, signature_of, strategy_options
from fsdp_core.lightning.setup_checks import (
    check_scattered_save,
    check_state_dict_type,
    check_waiting,
)
from fsdp_core.plugins.unknown_options import refuse_unknown_options
from fsdp_core.sharding.options import ShardingOptions, option_names

__all__ = ["SHARED_OPTIONS", "define_constructor", "read_options"]

#: What all strategies take.
SHARED_OPTIONS = strategy_options(ShardingOptions)


def define_constructor(cls: Any, base: type) -> None:
    """Give a strategy's class the signature, the constructor and the docstring that follow from its options.

    Args:
        cls: The class.
        base: The base that all strategies have.
    """
    cls.options_class = strategy_options(cls.options_class)
    cls.__signature__ = signature_of(cls, base)  # otherwise Sphinx would show that of __new__
    if "__init__" not in vars(cls):
        cls.__init__ = _constructor(cls)  # of its own, for jsonargparse to read
    cls.__doc__ = describe_class(cls, cls.options_class, cls.__signature__.parameters)


def _constructor(cls: Any) -> Callable[..., None]:
    """A constructor that passes everything on, with the signature of its class."""

    def __init__(self: Any, *positional: Any, **options: Any) -> None:
        super(cls, self).__init__(*positional, **options)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor: Any = __init__
    constructor.__qualname__, constructor.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    constructor.__signature__ = cls.__signature__.replace(parameters=[this, *cls.__signature__.parameters.values()])
    constructor.is_generated = True
    return __init__


def read_options(cls: Any, values: Mapping[str, Any]) -> Any:
    """A strategy's options, of its ``options_class``.

    Args:
        cls: The strategy's class.
        values: The constructor's arguments by name.

    Raises:
        UnsupportedCapabilityError: An option is unknown, or can't be used.
    """
    names = [name for name in option_names(cls.options_class) if name not in cls.left_out]
    unknown = {name: value for name, value in values.items() if name not in names}
    near = {"backend": "Did you mean 'process_group_backend'?"} if "process_group_backend" in names else {}
    refused: list[str] = []
    try:
        refuse_unknown_options(
            cls.strategy_name, cls, unknown, {**near, **cls.others_options}, always=cls.happens_anyway
        )
    except UnsupportedCapabilityError as error:
        refused.append(str(error))
    try:
        options = cls.options_class(**{name: values[name] for name in names if name in values})
    except UnsupportedCapabilityError as error:
        refused.append(str(error))
    if refused:
        raise UnsupportedCapabilityError("\n".join(refused))
    check_state_dict_type(options.state_dict_type)
    check_waiting(options.timeout, options.async_save)
    check_error_if_nonfinite(options.error_if_nonfinite)
    check_scattered_save(options.scattered_save, options.state_dict_type)
    return options
