"""A strategy's options, each said once: as the field of a frozen dataclass, from which everything else is derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from fsdp_core.device_names import GROUP_EXAMPLE
from fsdp_core.errors import UnsupportedCapabilityError

__all__ = [
    "ShardingOptions",
    "check_process_group_backend",
    "check_switches",
    "is_same_value",
    "option",
    "option_names",
]


class _Traits(NamedTuple):
    """What is known of an option besides its default; the attributes are the arguments of :func:`option`."""

    part_of: Literal["units"] | None = None
    describe: Callable[[Any], object] | None = None
    argument: str | None = None


def option(
    default: Any,
    *,
    part_of: Literal["units"] | None = None,
    describe: Callable[[Any], object] | None = None,
    argument: str | None = None,
) -> Any:
    """The field of an option that a sharded module can't change any more.

    Args:
        default: Its default.
        part_of: ``"units"`` for an option about how a module is sharded. Ranks compare it, a strategy that takes over a
            sharded module must have the same, and a function of the user that shards instead receives it.
        describe: Makes plain data of the value, to compare it; without it, the value is compared itself.
        argument: What such a function calls it, if that is another name.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class TheirsOptions(ShardingOptions):
        ...     bucket_bytes: int = 1024
        ...     cpu_offload: bool = option(False, part_of="units", argument="offload_policy")
        >>> TheirsOptions(cpu_offload=True, bucket_bytes=1).sharding_config()
        {'cpu_offload': True}
    """
    return field(default=default, metadata={"option": _Traits(part_of, describe, argument)})


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The options that all strategies take. A strategy's own are the fields of a class that inherits from it.

    A string below each field explains it. The strategy's signature, docstring and listing, what ranks compare and what
    errors name follow from the fields.
    """

    state_dict_type: Literal["sharded", "full"] = "sharded"
    """How checkpoints are saved: ``"sharded"`` (a folder, every rank writes its part) or ``"full"`` (one file)."""
    timeout: timedelta | None = None
    """How long a collective waits for its peers, a timedelta."""
    async_save: bool = False
    """Whether a save returns once the state is copied to host memory, and the checkpoint is written in the background,
    while training continues."""
    scattered_save: bool = False
    """Whether ranks that don't share a folder each save where they stand: hosts without a shared disk, or paths that
    differ. `fsdp checkpoint gather` joins what they have written."""
    save_frozen: bool = True
    """Whether checkpoints hold frozen parameters. ``False`` leaves those out that have the values still that the module
    was built with: a manifest has their digests, and a load takes them from the module, or from ``frozen_base``."""
    save_unchanged_buffers: bool = True
    """Whether checkpoints hold buffers that have the values still that the module was built with; see
    ``save_frozen``."""
    frozen_base: str | Path | None = None
    """The folder or file that frozen parameters come from. Checkpoints name it, and a load reads what they leave out
    from it where the module has other values. ``None``: a module has these values when it is restored."""
    error_if_nonfinite: bool = False
    """Whether to raise :class:`~fsdp_core.NonFiniteGradientError` on all ranks, with the names of parameters, before a
    step whose gradients hold NaN or infinity. With fp16, the gradient scaler skips such steps; nothing is raised."""
    hang_timeout: timedelta | float | None = 1800.0
    """How long ranks may wait for each other at one place, in seconds or as a timedelta. After it, every rank writes
    its stack, the rank that is behind is named, and all end. ``None`` lets them wait, and notices no lost rank."""

    def sharding_config(self) -> dict[str, object]:
        """The options about how a module is sharded, as plain data, to compare them."""
        return {
            name: getattr(self, name) if traits.describe is None else traits.describe(getattr(self, name))
            for name, traits in self._sharding_options()
        }

    def changed_options(self) -> list[str]:
        """The names of the options about how a module is sharded that have another value than their default."""
        defaults = {option_field.name: option_field.default for option_field in fields(self)}
        return [name for name, _ in self._sharding_options() if not is_same_value(getattr(self, name), defaults[name])]

    def arguments(self) -> dict[str, Any]:
        """The options about how a module is sharded, for a function of the user that shards instead."""
        return {traits.argument or name: getattr(self, name) for name, traits in self._sharding_options()}

    def argument_names(self) -> dict[str, str]:
        """The names of these options in :meth:`arguments`, by the option's name."""
        return {name: traits.argument or name for name, traits in self._sharding_options()}

    def _sharding_options(self) -> Iterator[tuple[str, _Traits]]:
        for option_field in fields(self):
            traits: _Traits = option_field.metadata.get("option", _Traits())
            if traits.part_of == "units":
                yield option_field.name, traits


def check_switches(options: ShardingOptions) -> None:
    """Refuse what is neither ``True`` nor ``False`` for an option annotated as ``bool``, or ``bool | None``.

    Libraries would take the string ``"no"`` for ``True``.

    Raises:
        UnsupportedCapabilityError: There is such a value.

    Example:
        >>> check_switches(ShardingOptions(async_save=True))
    """
    for option_field in fields(options):
        value = getattr(options, option_field.name)
        may_be_none = option_field.type in ("bool | None", bool | None)
        is_switch = may_be_none or option_field.type in ("bool", bool)
        is_right = isinstance(value, bool) or (may_be_none and value is None)
        if is_switch and not is_right:
            raise UnsupportedCapabilityError(
                f"{option_field.name}={value!r} is neither True nor False.\n"
                f"Write one of them; it is {option_field.default} by default."
            )


def check_process_group_backend(backend: object) -> None:
    """Refuse a backend of process groups that torch does not know. torch itself would do so when the ranks meet.

    Args:
        backend: A backend's name, a list of them by device such as ``"cpu:gloo,npu:hccl"``, or ``None``.

    Raises:
        UnsupportedCapabilityError: It is none.

    Example:
        >>> check_process_group_backend("cpu:gloo")
    """
    if backend is None or not dist.is_available():
        return
    available = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    is_known = False
    if isinstance(backend, str):
        names = [entry.rpartition(":")[2] for entry in backend.split(",")]
        is_known = all(name.lower() in available for name in names)
    if not is_known:
        raise UnsupportedCapabilityError(
            f"process_group_backend={backend!r} is no backend of torch.distributed.\n"
            f"Write one of {', '.join(map(repr, available))}; one for each device, such as {GROUP_EXAMPLE!r}; or "
            "leave it out: it is chosen by device. A package that brings another must be imported before."
        )


def option_names(options_class: type[ShardingOptions]) -> list[str]:
    """The names of all options: those of the class itself first, in their order, then those of its bases."""
    all_names = [option_field.name for option_field in fields(options_class)]
    own_first: list[str] = []
    for base in options_class.__mro__:
        for name in vars(base).get("__annotations__", ()):
            if name in all_names and name not in own_first:
                own_first.append(name)
    return own_first


def is_same_value(value: object, default: object) -> bool:
    """Whether an option has a value, and no other that is equal to it, as ``1`` is to ``True``."""
    return value is default or (type(value) is type(default) and value == default)
