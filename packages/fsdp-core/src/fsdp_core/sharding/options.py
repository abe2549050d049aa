"""A strategy's options, each said once: as the field of a frozen dataclass, from which everything else is derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from fsdp_core.device_names import GROUP_EXAMPLE
from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["ShardingOptions", "check_process_group_backend", "check_switches", "option", "option_names"]


class _Traits(NamedTuple):
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
    """The field of an option that is more than a value: one of those that a sharded module can't change any more.

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
            for name, traits in self._of_units()
        }

    def given(self) -> list[str]:
        """The names of the options about how a module is sharded that have another value than their default."""
        defaults = {each.name: each.default for each in fields(self)}
        return [name for name, _ in self._of_units() if not _is_same(getattr(self, name), defaults[name])]

    def arguments(self) -> dict[str, Any]:
        """The options about how a module is sharded, for a function of the user that shards instead."""
        return {traits.argument or name: getattr(self, name) for name, traits in self._of_units()}

    def argument_names(self) -> dict[str, str]:
        """What such a function calls them, by the option's name."""
        return {name: traits.argument or name for name, traits in self._of_units()}

    def _of_units(self) -> Iterator[tuple[str, _Traits]]:
        for each in fields(self):
            traits: _Traits = each.metadata.get("option", _Traits())
            if traits.part_of == "units":
                yield each.name, traits


def check_switches(options: ShardingOptions) -> None:
    """Refuse what is neither ``True`` nor ``False`` for an option that is annotated as ``bool``, or as it or ``None``.

    ``"no"`` is true, and libraries would take it for that.

    Raises:
        UnsupportedCapabilityError: There is such a value.

    Example:
        >>> check_switches(ShardingOptions(async_save=True))
    """
    for each in fields(options):
        value = getattr(options, each.name)
        is_switch = each.type in ("bool", bool) or (each.type in ("bool | None", bool | None) and value is not None)
        if is_switch and not isinstance(value, bool):
            raise UnsupportedCapabilityError(
                f"{each.name}={value!r} is neither True nor False.\nWrite one of them; it is {each.default} by default."
            )


def check_process_group_backend(backend: object) -> None:
    """Refuse a backend of process groups that torch does not know, which it would say when ranks meet.

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
    names = [each.rpartition(":")[2] for each in backend.split(",")] if isinstance(backend, str) else [""]
    if not all(name.lower() in available for name in names):
        raise UnsupportedCapabilityError(
            f"process_group_backend={backend!r} is no backend of torch.distributed.\n"
            f"Write one of {', '.join(map(repr, available))}; one for each device, such as {GROUP_EXAMPLE!r}; or "
            "leave it out: it is chosen by device. A package that brings another must be imported before."
        )


def option_names(options_class: type[ShardingOptions]) -> list[str]:
    """The names of all options: those of the class itself first, in their order, then those of its bases."""
    all_names = [each.name for each in fields(options_class)]
    own_first: dict[str, None] = {}
    for base in options_class.__mro__:
        own_first.update(dict.fromkeys(name for name in vars(base).get("__annotations__", ()) if name in all_names))
    return list(own_first)


def _is_same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)
