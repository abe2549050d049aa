"""How strategies are pickled and copied before they have sharded a module."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, TypeVar

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.constructing import ConstructedStrategy

__all__ = ["copy_strategy", "reduce_strategy"]

S = TypeVar("S", bound=ConstructedStrategy)


def reduce_strategy(
    strategy: ConstructedStrategy, *, name: str, is_sharded: bool, set_by_lightning: Collection[str], advice: str
) -> tuple[Any, ...]:
    """Reduce a strategy to its constructor's arguments and what Lightning has set since; the rest is made anew.

    Args:
        strategy: The strategy.
        name: The name that users type.
        is_sharded: Whether it has sharded a module.
        set_by_lightning: The attributes that Lightning sets after the constructor.
        advice: What to do instead if it has sharded a module.

    Returns:
        What ``__reduce__`` returns.

    Raises:
        ShardingError: It has sharded a module.
    """
    if is_sharded:
        raise ShardingError(
            f"strategy={name!r} can't be pickled once it has sharded a module: shards, process groups and hooks "
            f"belong to this process.\n{advice}"
        )
    args, options = strategy._built_with
    attributes = {key: value for key, value in vars(strategy).items() if key in set_by_lightning}
    return _construct, (type(strategy), args, options), attributes


def _construct(cls: type[S], args: tuple[Any, ...], options: dict[str, Any]) -> S:
    return cls(*args, **options)


def copy_strategy(strategy: S, memo: dict[int, Any]) -> S:
    """Copy a strategy deeply, with what belongs to its run, as ``__deepcopy__`` does."""
    args, options = strategy._built_with
    copied = type(strategy).__new__(type(strategy), *args, **options)
    memo[id(strategy)] = copied
    state: Any = strategy.__getstate__()
    vars(copied).update(copy.deepcopy(state, memo))
    return copied
