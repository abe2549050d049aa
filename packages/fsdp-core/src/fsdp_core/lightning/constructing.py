"""What a strategy's class takes: its options by name and by position, and the signature that follows from them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from lightning.fabric.accelerators import Accelerator

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.capability_checks import StrategyCapabilities, check_options
from fsdp_core.lightning.features.finite_gradients import check_error_if_nonfinite
from fsdp_core.lightning.options import describe_class, signature_of, strategy_options
from fsdp_core.lightning.setup_checks import (
    check_save_frozen,
    check_scattered_save,
    check_state_dict_type,
    check_timeout_and_async_save,
)
from fsdp_core.plugins.unknown_options import refuse_unknown_options
from fsdp_core.sharding.options import ShardingOptions, check_process_group_backend, check_switches, option_names

__all__ = ["ConstructedStrategy", "define_constructor"]


def define_constructor(cls: Any, base: type) -> None:
    """Give a strategy's class the signature, the constructor and the docstring that follow from its options.

    Args:
        cls: The class.
        base: The base that all strategies have.
    """
    cls.options_class = strategy_options(cls.options_class)
    cls.__signature__ = signature_of(cls, base)  # otherwise Sphinx would show that of __new__
    if "__init__" not in vars(cls):
        cls.__init__ = _make_constructor(cls)  # jsonargparse reads the signature of the class's own constructor
    cls.__doc__ = describe_class(cls, cls.options_class, cls.__signature__.parameters)


def _make_constructor(cls: Any) -> Callable[..., None]:
    """A constructor that passes everything on, with the signature of its class."""

    def __init__(self: Any, *positional: Any, **options: Any) -> None:
        super(cls, self).__init__(*positional, **options)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor: Any = __init__
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    constructor.__module__ = cls.__module__
    constructor.__signature__ = cls.__signature__.replace(parameters=[this, *cls.__signature__.parameters.values()])
    constructor.is_generated = True
    return __init__


def _construct(cls: type[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return cls(*args, **options)


class ConstructedStrategy(StrategyCapabilities):
    """A base of every strategy's class: takes the options. Comes before Lightning's class in the MRO.

    Attributes:
        strategy_name: The name that users type.
        options_class: The class of the options.
        positional: The names of the options that may be given by position.
        left_out: The names of options of all strategies that this one does not take.
        migration_hints: By option of another library, what to write instead.
        accepted_noops: Values of such options that ask for what happens anyway.
        options: The options of this strategy.
    """

    options_class: ClassVar[type[ShardingOptions]] = strategy_options(ShardingOptions)
    positional: ClassVar[Sequence[str]] = ()
    left_out: ClassVar[Collection[str]] = ()
    migration_hints: ClassVar[Mapping[str, str]] = {}
    accepted_noops: ClassVar[Mapping[str, Collection[object]]] = {}
    __signature__: ClassVar[inspect.Signature]

    options: Any  # of options_class
    _built_with: tuple[tuple[Any, ...], dict[str, Any]]  # the constructor's arguments

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # before the constructor, which may not accept the refused options at all
        check_options(cls, args, options)
        strategy = super().__new__(cls)
        strategy._built_with = args, options
        return strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        args, options = self._built_with
        copied = type(self).__new__(type(self), *args, **options)
        memo[id(self)] = copied
        state: Any = self.__getstate__()
        vars(copied).update(copy.deepcopy(state, memo))
        return copied

    def _reduce_to_arguments(
        self, *, is_sharded: bool, set_by_lightning: Collection[str], advice: str
    ) -> tuple[Any, ...]:
        """Return what ``__reduce__`` returns: the constructor's arguments and what Lightning has set since.

        Args:
            is_sharded: Whether the strategy has sharded a module.
            set_by_lightning: The attributes that Lightning sets after the constructor.
            advice: What to do instead if it has sharded a module.

        Raises:
            ShardingError: It has sharded a module.
        """
        if is_sharded:
            raise ShardingError(
                f"strategy={self.strategy_name!r} can't be pickled once it has sharded a module: shards, process "
                f"groups and hooks belong to this process.\n{advice}"
            )
        args, options = self._built_with
        attributes = {name: value for name, value in vars(self).items() if name in set_by_lightning}
        return _construct, (type(self), args, options), attributes

    def _arguments_by_name(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments by name."""
        values = dict(zip(self.positional, positional, strict=False))
        repeated = [name for name in values if name in keywords]
        if len(positional) > len(self.positional) or repeated:
            class_name = type(self).__name__
            reason = f"only {len(self.positional)} can be so given"
            if repeated:
                reason = f"{repeated[0]} is given by keyword too"
            example = ", ".join(f"{option}=..." for option in self.positional[:2])
            raise TypeError(
                f"{class_name} was given {len(positional)} options by position, and {reason}.\n"
                f"Write keywords: {class_name}({example}, ...)."
            )
        return {**values, **keywords}

    def _read_options(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The options from the constructor's arguments.

        Args:
            positional: Those that were given by position.
            keywords: Those that were given by keyword.

        Raises:
            UnsupportedCapabilityError: An option is unknown, or can't be used.
        """
        values = self._arguments_by_name(positional, keywords)
        names = [name for name in option_names(self.options_class) if name not in self.left_out]
        unknown = {name: value for name, value in values.items() if name not in names}
        hints = dict(self.migration_hints)
        if "process_group_backend" in names:
            hints.setdefault("backend", "Did you mean 'process_group_backend'?")
        messages: list[str] = []  # of both steps, to report all that is wrong at once
        try:
            refuse_unknown_options(self.strategy_name, type(self), unknown, hints, accepted=self.accepted_noops)
        except UnsupportedCapabilityError as error:
            messages.append(str(error))
        try:
            options = self.options_class(**{name: values[name] for name in names if name in values})
        except UnsupportedCapabilityError as error:
            messages.append(str(error))
        if messages:
            raise UnsupportedCapabilityError("\n".join(messages))
        check_state_dict_type(options.state_dict_type)
        check_timeout_and_async_save(options.timeout, options.async_save)
        check_error_if_nonfinite(options.error_if_nonfinite)
        check_scattered_save(options.scattered_save, options.state_dict_type)
        check_switches(options)
        check_save_frozen(options)
        check_process_group_backend(getattr(options, "process_group_backend", None))
        self._check_accelerator(getattr(options, "accelerator", None))
        return options

    def _check_accelerator(self, accelerator: object) -> None:
        """Refuse what is no accelerator: it is the first option by position, and in other libraries another one is."""
        if not isinstance(accelerator, Accelerator | None):
            name = type(self).__name__
            raise UnsupportedCapabilityError(
                f"accelerator={accelerator!r} is no Accelerator of Lightning's. It is the first option of {name} by "
                f"position.\nWrite options by keyword: {name}(auto_wrap_policy={{MyBlock}}); and the accelerator's "
                'name to Trainer or Fabric: accelerator="cpu".'
            )
