"""Options about activations: what they accept, and which modules offload theirs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import SavedOps, check_saved_ops, describe_policy

__all__ = ["check_activations", "described_ops", "modules_to_offload"]


def check_activations(policy: object, saves: object, budget: object, offload: object) -> SavedOps | None:
    """Read the options about activations.

    Args:
        policy: ``activation_checkpointing_policy``.
        saves: ``activation_checkpointing_saves``.
        budget: ``activation_memory_budget``, whose value :func:`check_compile` checks.
        offload: ``activation_offload``.

    Returns:
        The operations whose results are kept: torch's operators, or a policy function. ``None`` if all is recomputed.

    Raises:
        UnsupportedCapabilityError: A value is not known, or options contradict each other.
    """
    if not isinstance(offload, bool):
        raise UnsupportedCapabilityError(
            f"activation_offload={offload!r} is not known to 'fsdp2'.\n"
            "Write True to keep the units' activations in host memory, or False."
        )
    if policy is not None and budget is not None:
        raise UnsupportedCapabilityError(
            f"activation_checkpointing_policy={describe_policy(policy)} and activation_memory_budget={budget!r} both "
            "say what is recomputed.\nWrite one of them."
        )
    if saves is None:
        return None
    if policy is None:
        raise UnsupportedCapabilityError(
            "activation_checkpointing_saves says which results are kept where activations are recomputed, and none "
            "are.\nAdd activation_checkpointing_policy, such as {MyBlock} or 'every_1' for every repeated block."
        )
    return check_saved_ops(saves, "activation_checkpointing_saves")


def described_ops(saved: SavedOps | None) -> object:
    """The operations as plain data, for comparison between ranks and strategies."""
    return describe_policy(saved) if saved is None or callable(saved) else sorted(map(str, saved))


def modules_to_offload(root: nn.Module, units: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """The modules whose activations are kept in host memory.

    Raises:
        ShardingError: There are none.
    """
    if not units:
        raise ShardingError(
            f"activation_offload=True keeps the activations of units in host memory, and {type(root).__name__} has "
            "none but itself.\nName the class of its blocks with auto_wrap_policy={MyBlock}."
        )
    return units
