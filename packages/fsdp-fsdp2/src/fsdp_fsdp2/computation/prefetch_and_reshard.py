"""How many units are gathered ahead of their use, and which units are freed between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import describe_policy

__all__ = ["ReshardPolicy", "check_depth", "check_reshard", "described_reshard", "prefetch", "reshards"]

#: The classes of units that reshard after their forward pass; or a function that says for a unit whether it does, or
#: over how many ranks it stays sharded.
ReshardPolicy = Collection[type[nn.Module]] | Callable[[nn.Module], bool | int | None]

_HOW_TO = (
    "Write True, False, None (all but the root and the last unit reshard), the number of ranks to shard over, a set of "
    "the units' classes that reshard, or a function unit -> any of these values."
)


def check_depth(name: str, depth: object) -> None:
    """Refuse what is no number of units to prefetch.

    Raises:
        UnsupportedCapabilityError: It is neither ``None`` nor a positive integer.
    """
    if depth is not None and (type(depth) is not int or depth < 1):
        raise UnsupportedCapabilityError(
            f"{name}={depth!r} is not a number of units.\nWrite a positive integer, or None for torch's own choice."
        )


def prefetch(root: nn.Module, units: Sequence[nn.Module], forward: int | None, backward: int | None) -> None:
    """Let each unit gather ahead the units that come next, in the forward or in the backward pass.

    Args:
        root: The sharded module.
        units: Its units, innermost first.
        forward: The number of units to gather ahead in the forward pass; ``None`` leaves it to torch, which gathers
            none ahead.
        backward: The same for the backward pass; ``None`` leaves it to torch, which gathers one ahead, by the order in
            which the forward passes ended.
    """
    unit_ids = {id(unit) for unit in (*units, root)}
    # a forward pass gathers a unit before those inside it, and leaves it after them, where the backward pass begins
    forward_order: list[Any] = [module for module in root.modules() if id(module) in unit_ids]
    backward_order: list[Any] = [root, *reversed(units)]
    if forward is not None:
        for index, unit in enumerate(forward_order, start=1):
            unit.set_modules_to_forward_prefetch(forward_order[index : index + forward])
    if backward is not None:
        for index, unit in enumerate(backward_order, start=1):
            unit.set_modules_to_backward_prefetch(backward_order[index : index + backward])


def check_reshard(policy: object) -> None:
    """Refuse values of ``reshard_after_forward`` that are not known.

    Raises:
        UnsupportedCapabilityError: It is no such value or policy.
    """
    if isinstance(policy, bool | int | None):
        return
    if isinstance(policy, Collection) and not isinstance(policy, str | bytes) and policy:
        wrong = [element for element in policy if not (isinstance(element, type) and issubclass(element, nn.Module))]
        if not wrong:
            return
        raise UnsupportedCapabilityError(
            f"reshard_after_forward holds {wrong[0]!r}, which is no class of modules.\n{_HOW_TO}"
        )
    if isinstance(policy, type) or not callable(policy):
        raise UnsupportedCapabilityError(f"reshard_after_forward={policy!r} is not known to 'fsdp2'.\n{_HOW_TO}")


def described_reshard(policy: bool | int | ReshardPolicy | None) -> object:
    """The policy as plain data, for comparison between ranks and strategies."""
    return policy if isinstance(policy, bool | int | None) else describe_policy(policy)


def reshards(
    policy: bool | int | ReshardPolicy | None,
    root: nn.Module,
    units: Sequence[nn.Module],
    ranks: int,
    tensor_parallel: int = 1,
) -> dict[nn.Module, bool | int | None]:
    """Which units reshard after their forward pass, as ``fully_shard`` takes it.

    A root that reshards would have no parameters when a step method calls its forward. It keeps torch's default, unless
    nothing reshards.

    Args:
        policy: See :data:`ReshardPolicy`, or one value for all units; ``None`` for all but the last unit, which the
            backward pass would gather again immediately.
        root: The module, for which the policy is not asked.
        units: Its units.
        ranks: The number of ranks that parameters are sharded over.
        tensor_parallel: The number of ranks that divide layers.

    Raises:
        ShardingError: No unit is of the classes.
        UnsupportedCapabilityError: A number does not divide the ranks, or layers are divided as well, or a function
            returned no such value.
    """
    _check_divides(policy, ranks, tensor_parallel)
    decisions: dict[nn.Module, bool | int | None] = {root: False if policy is False else None}
    classes = tuple(policy) if isinstance(policy, Collection) else None
    if classes is not None and not any(isinstance(unit, classes) for unit in units):
        raise ShardingError(
            f"reshard_after_forward={describe_policy(policy)} matches no unit of {type(root).__name__}.\n"
            f"Its units are of: {', '.join(dict.fromkeys(type(unit).__name__ for unit in units)) or 'none'}.\n{_HOW_TO}"
        )
    for unit in units:
        if classes is not None:
            chosen: Any = isinstance(unit, classes)
        else:
            chosen = policy(unit) if callable(policy) else policy
        if not isinstance(chosen, bool | int | None):
            raise UnsupportedCapabilityError(
                f"reshard_after_forward={describe_policy(policy)} returned {chosen!r} for a {type(unit).__name__}.\n"
                "Return True, False, None, or the number of ranks to shard over."
            )
        _check_divides(chosen, ranks, tensor_parallel)
        decisions[unit] = False if chosen is None and unit is units[-1] else chosen
    return decisions


def _check_divides(size: object, ranks: int, tensor_parallel: int) -> None:
    if type(size) is not int:
        return
    if size < 1 or ranks % size:
        raise UnsupportedCapabilityError(
            f"reshard_after_forward={size} does not divide the {ranks} ranks into groups.\n"
            "Write a number that divides them, or True, False, or None: all but the root and the last unit reshard."
        )
    if tensor_parallel > 1 and 1 < size < ranks:
        raise UnsupportedCapabilityError(
            f"reshard_after_forward={size} does not go together with tensor_parallel_size={tensor_parallel}: torch "
            "can't keep parameters that tensor-parallel ranks divide over groups of ranks.\n"
            "Write True, False, or None: all but the root and the last unit reshard."
        )
