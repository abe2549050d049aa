"""Backward passes that record a graph of their own, which keeps parameters gathered."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_core.sharding import forget_writes
from fsdp_fsdp2.torch_private.gathered_values import end_anyway, is_written_since_gathered, register_with_gathered
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_of, trainable_params

__all__ = ["RecordedGraphs", "free_written"]


class RecordedGraphs:
    """Keeps units gathered for backward passes that record their own graph, as with ``create_graph=True``.

    That graph holds the parameters, and reaches none of the unit's outputs when it is differentiated, where
    ``fully_shard`` would gather: it would compute with memory that was freed. So all units stay gathered from such a
    pass on, until the end of the next one that records nothing. The end of one that reaches no output either is queued
    by hooks of the parameters.

    Args:
        groups: The parameter groups of all units.
        of_root: The root's state.

    Attributes:
        has_freed: Whether parameters were freed that such a graph may still hold.
    """

    def __init__(self, groups: Sequence[Any], of_root: weakref.ref[Any]) -> None:
        self._groups, self._of_root = groups, of_root
        self._hooks: dict[Any, Any] = {}
        self._kept_groups: set[Any] = set()
        self._records = self._exists = self.has_freed = False
        for group in groups:
            group.reshard = partial(_reshard_unless_kept, weakref.ref(self), weakref.ref(group))

    def __bool__(self) -> bool:
        return self._exists

    def begin(self) -> None:
        """Record that the backward pass that runs records its own graph."""
        self._records = self._exists = True
        for parameter in (p for group in self._groups for p in trainable_params(group)):
            if parameter in self._hooks or not parameter._unsharded_param.requires_grad:
                continue
            end = partial(end_anyway, self._of_root)
            self._hooks[parameter] = register_with_gathered(parameter._unsharded_param, end)

    def end(self, *, is_last: bool) -> None:
        """End a backward pass.

        Args:
            is_last: Whether no forward pass goes on after it.
        """
        if is_last and not self._records:
            self.release()
        self._records = False

    def keep(self, group: Any) -> bool:
        """Whether a unit that torch would reshard is kept."""
        if self._exists and group._training_state in (TrainingState.FORWARD, TrainingState.POST_BACKWARD):
            self._kept_groups.add(group)
            return True
        return False

    def release(self) -> None:
        """Reshard what was kept. A graph that still holds it raises when it is differentiated."""
        self._records = self._exists = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        groups, self._kept_groups = self._kept_groups, set()
        for group in groups:
            if not group.is_sharded:
                self.has_freed = True
                group.reshard()
                gathered = [parameter._unsharded_param for parameter in group.fsdp_params]
                increment_version(gathered)
                for each in gathered:
                    forget_writes(each)


def _reshard_unless_kept(recorded: weakref.ref[RecordedGraphs], group_ref: weakref.ref[Any]) -> None:
    graphs = recorded()
    group: Any = group_ref()
    if graphs is None or not graphs.keep(group):
        type(group).reshard(group)


def free_written(unit: FSDPModule, recorded: RecordedGraphs) -> bool:
    """Free a unit whose shards were written to since it was gathered: it still is, or is sharded over fewer ranks.

    A graph that needs what was gathered raises when it is differentiated, as it does in plain torch.

    Args:
        unit: The unit.
        recorded: What keeps units gathered for a graph.

    Returns:
        Whether one was freed.
    """
    freed = False
    for group in param_groups_of(unit):
        if group.is_sharded or not is_written_since_gathered(group):
            continue
        recorded.release()
        group._to_sharded()  # reshard() does nothing in a forward pass of a unit that stays gathered after it
        freed = True
    return freed
