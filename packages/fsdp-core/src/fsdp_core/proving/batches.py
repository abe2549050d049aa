"""The batches of a proof: what each rank gets in each step, and the whole batches that these are parts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import ShardingError
from fsdp_core.torch_private.fake_tensors import tree_leaves

__all__ = ["batches_of_one_size", "join_batches"]


def batches_of_one_size(drawn: Sequence[Any], count: int) -> list[Any]:
    """As many batches, repeated if there are fewer, without those that have fewer rows than the first.

    The last batch of an epoch is often a smaller one, and means over it weigh a row more than other means do.

    Args:
        drawn: The first batches of a loader.
        count: How many are needed.
    """

    def rows(batch: Any) -> list[int]:
        return [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]

    alike = [batch for batch in drawn if rows(batch)[:1] == rows(drawn[0])[:1]]
    return list(islice(cycle(alike), count))


def join_batches(parts: Sequence[Any]) -> Any:
    """The batch whose rows are those of the parts, one after the other.

    Tensors are concatenated along their first dimension, in dicts, lists and tuples too. What has no rows must be the
    same in all parts.

    Args:
        parts: Batches of the same structure.

    Raises:
        ShardingError: They can't be joined; it says why.

    Example:
        >>> join_batches([{"x": torch.tensor([1]), "scale": 2}, {"x": torch.tensor([3]), "scale": 2}])
        {'x': tensor([1, 3]), 'scale': 2}
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts)
    if any(type(part) is not type(first) for part in parts):
        raise _refusal(f"one has {type(first).__name__} where another has something else")
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise _refusal("they have different keys")
        joined = {key: join_batches([part[key] for part in parts]) for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        return _join_sequences(parts)
    if isinstance(first, str | bytes | int | float | bool | type(None)):
        if any(part != first for part in parts):
            raise _refusal(f"{first!r} differs between them, and has no rows")
        return first
    raise _refusal(f"nothing is known of the rows of {type(first).__name__}")


def _join_tensors(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if first.ndim == 0:
        if any(not torch.equal(part, first) for part in parts):
            raise _refusal("a tensor without dimensions differs between them")
        return first
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        shapes = " and ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise _refusal(f"rows have different shapes: tensors of {shapes}")
    return torch.cat(list(parts))


def _join_sequences(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if all(isinstance(item, str | bytes | int | float) for item in first):
        joined = [item for part in parts for item in part]  # one for each row
    elif any(len(part) != len(first) for part in parts):
        raise _refusal("lists of tensors have different lengths")
    else:
        joined = [join_batches(items) for items in zip(*parts, strict=True)]
    if hasattr(first, "_fields"):
        return type(first)(*joined)
    return type(first)(joined)


def _refusal(why: str) -> ShardingError:
    return ShardingError(
        f"the batches of ranks can't be joined to a whole one: {why}.\n"
        "Give the script batches of tensors whose rows have one shape."
    )
