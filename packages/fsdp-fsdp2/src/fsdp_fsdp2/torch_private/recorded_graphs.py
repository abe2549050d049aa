"""Backward passes that record a graph of their own, which keeps parameters gathered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch.autograd.graph import increment_version
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_core.sharding import forget_writes
from fsdp_fsdp2.torch_private.gathered_values import end_anyway, is_written_since_gathered, register_with_gathered
from fsdp_fsdp2.torch_private.parameter_groups import trainable_params

__all__ = ["RecordedGraphs", "free_written"]


class RecordedGraphs:
    """Keeps units gathered for backward passes that record their own graph, as with ``create_graph=True``.

    Such a graph holds the parameters. When it is differentiated, it passes through no unit's output, where
    ``fully_shard`` gathers, and would compute with memory that was freed. So all units stay gathered from the pass that
    records on, until the end of the next pass that does not. That pass may reach no output either; therefore its end is
    queued by hooks of the parameters.

    Args:
        groups: The parameter groups of all units.
        root_state_ref: The root's state, held weakly.

    Attributes:
        has_freed: Whether parameters were freed that a recorded graph may still hold.
    """

    def __init__(self, groups: Sequence[Any], root_state_ref: weakref.ref[Any]) -> None:
        self._groups, self._root_state_ref = groups, root_state_ref
        self._hooks: dict[Any, Any] = {}  # by parameter
        self._kept_groups: set[Any] = set()
        self._is_recording = False  # whether the backward pass that runs records its own graph
        self._has_graph = False  # whether a pass has recorded one, and no other pass has ended since
        self.has_freed = False
        for group in groups:
            group.reshard = partial(_reshard_unless_kept, weakref.ref(self), weakref.ref(group))

    def __bool__(self) -> bool:
        return self._has_graph

    def begin(self) -> None:
        """Record that the backward pass that runs records its own graph."""
        self._is_recording = self._has_graph = True
        for parameter in (p for group in self._groups for p in trainable_params(group)):
            if parameter in self._hooks or not parameter._unsharded_param.requires_grad:
                continue
            end_pass = partial(end_anyway, self._root_state_ref)
            self._hooks[parameter] = register_with_gathered(parameter._unsharded_param, end_pass)

    def end(self, *, is_last: bool) -> None:
        """End a backward pass.

        Args:
            is_last: Whether it was not inside a forward pass, which goes on after it.
        """
        if is_last and not self._is_recording:
            self.release()
        self._is_recording = False

    def keep(self, group: Any) -> bool:
        """Keep a unit that torch is about to reshard after a pass, if there is a graph.

        Returns:
            Whether it is kept.
        """
        if self._has_graph and group._training_state in (TrainingState.FORWARD, TrainingState.POST_BACKWARD):
            self._kept_groups.add(group)
            return True
        return False

    def release(self) -> None:
        """Reshard what was kept. A graph that still holds it raises when it is differentiated."""
        self._is_recording = self._has_graph = False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        groups, self._kept_groups = self._kept_groups, set()
        for group in groups:
            if not group.is_sharded:
                self.has_freed = True
                group.reshard()
                gathered_params = [parameter._unsharded_param for parameter in group.fsdp_params]
                increment_version(gathered_params)  # by this count the graph knows that its tensors have changed
                for gathered in gathered_params:
                    forget_writes(gathered)


def _reshard_unless_kept(recorded_ref: weakref.ref[RecordedGraphs], group_ref: weakref.ref[Any]) -> None:
    """Replaces ``group.reshard``."""
    recorded = recorded_ref()
    group: Any = group_ref()
    if recorded is None or not recorded.keep(group):
        type(group).reshard(group)


def free_written(groups: Iterable[Any], recorded: RecordedGraphs) -> bool:
    """Free what a unit still has gathered, or sharded over fewer ranks, if its shards were written to since.

    A graph that needs what was gathered raises when it is differentiated, as in plain torch.

    Args:
        groups: The unit's parameter groups.
        recorded: What keeps units gathered for a graph.

    Returns:
        Whether anything was freed.
    """
    has_freed = False
    for group in groups:
        if group.is_sharded or not is_written_since_gathered(group):
            continue
        recorded.release()
        group._to_sharded()  # reshard() does nothing in a forward pass after which the unit stays gathered
        has_freed = True
    return has_freed
