"""Backward passes that FSDP1 does not expect: inside a forward pass, inside another one, or without gradients to keep.

FSDP1 expects each backward pass to begin at what the root has returned (``_pre_backward_hook``), to reach the output of
a unit before the unit's parameters, and to add to their gradients. A pass that does otherwise finds units freed, leaves
them in states that the next call takes for errors, or loses gradients. Four kinds do:

- ``torch.autograd.grad`` adds to no parameter's gradient. FSDP1 would set the gradients of the last step aside, and
  give them back only at the end of a pass of the whole root. Here units are gathered, and reduce nothing.
- A backward pass may begin inside the root's forward pass. Here one of the root is begun; the forward pass then goes
  on.
- A pass may reach a unit, or its parameters, without passing through the root's output. Here, too, one of the root is
  begun.
- With ``create_graph=True`` a pass records a graph of its own. That holds parameters, and calls no hook of FSDP1 when
  it is differentiated: all units stay gathered until they are resharded explicitly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_forward_reshard, _pre_backward_hook, _unshard

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import guard_parameters, is_accumulated, outside_of_compilation, unguard_parameters
from fsdp_core.state import gathered_modules
from fsdp_cuda_native.torch_private.flat_parameters import reduction_hooks, units
from fsdp_cuda_native.torch_private.flat_parameters.frozen import finish_frozen_units, follow_frozen
from fsdp_cuda_native.torch_private.flat_parameters.resharding import keep_gathered
from fsdp_cuda_native.torch_private.flat_parameters.written_shards import count_writes_to_each, refuse_written_since
from fsdp_cuda_native.torch_private.passes.unit_calls import tensors_in
from fsdp_cuda_native.torch_private.passes.unvisited_units import queue_waiting

__all__ = ["NestedPasses"]


class NestedPasses:
    """Prepares a root's units for backward passes, before FSDP1 does.

    A backward pass is known by the id that autograd gives its graph task.

    Args:
        root: The root.
        is_running: Whether the root's forward pass is running.
        begin_inside: Begins a backward pass of the root inside its running forward pass.
    """

    def __init__(self, root: FSDP, is_running: Callable[[], bool], begin_inside: Callable[[], None]) -> None:
        self._root = weakref.ref(root)
        self._units = weakref.WeakSet({root, *units.units_of(root)})
        self._is_running = is_running
        self._begin_inside = begin_inside
        #: The pass for which :meth:`adds_gradients` was asked last, and the answer.
        self._last_task: int | None = None
        self._adds_gradients = False
        #: The last pass of the root, and the last one inside it.
        self._outer_task: int | None = None
        self._inner_task: int | None = None
        #: The running passes that add to no gradient.
        self._tasks_without_gradients: set[int] = set()
        #: The last pass that has reached a unit.
        self._task_of_unit = weakref.WeakKeyDictionary[FSDP, int]()
        self_ref = weakref.ref(self)
        for unit in self._units:
            unit.module.register_forward_hook(partial(_watch_output, self_ref, weakref.ref(unit)))
            if units.handle_of(unit) is not None:
                unit.module.register_forward_pre_hook(partial(_watch_new_nodes, self_ref, weakref.ref(unit)))

    def follows_calls(self) -> bool:
        """Whether calls of units are now recorded for backward passes, in which FSDP1 gathers."""
        return torch.is_grad_enabled() and self._root() not in gathered_modules

    def adds_gradients(self, further_nodes: Iterable[Any] = ()) -> bool:
        """Whether the backward pass that runs adds to gradients of flat parameters.

        Args:
            further_nodes: Nodes that may add to them, besides those of which FSDP1 knows.
        """
        task = torch._C._current_graph_task_id()
        nodes = further_nodes
        if task != self._last_task:
            for unit in self._units:
                follow_frozen(unit)
            nodes = chain(further_nodes, (node for unit in self._units for node in reduction_hooks.nodes_of(unit)))
            # FSDP1 forgets all nodes at the end of another pass, such as one in a hook of this one's loss
            units_without_nodes = filter(_lacks_nodes, self._units)
            self._adds_gradients = any(is_accumulated(units.handle_of(unit).flat_param) for unit in units_without_nodes)
            self._last_task = task
        if not self._adds_gradients:  # the nodes of an earlier question may have been those of frozen units
            self._adds_gradients = any(map(torch._C._will_engine_execute_node, nodes))
        return self._adds_gradients

    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward pass of the root runs."""
        root: Any = self._root()
        is_root_idle = root.training_state == TrainingState.IDLE
        return bool(is_root_idle and torch._C._current_graph_task_id() not in self._tasks_without_gradients)

    def note_pass_of_root(self) -> None:
        """Note a backward pass that FSDP1 begins at the root's output, or at a loss in place of that."""
        root = self._root()
        if root is not None and not units.is_in_backward(root):
            self._outer_task = self._task_of_unit[root] = torch._C._current_graph_task_id()

    def watch_tensors(self, unit: FSDP, tensors: Iterable[Tensor]) -> None:
        """Prepare for backward passes that reach a unit at tensors which leave its call."""
        has_params = units.handle_of(unit) is not None
        counts_at_call = count_writes_to_each(unit) if has_params else None
        # a root without parameters of its own stands for all units
        nodes = [node for each in ([unit] if has_params else self._units) for node in reduction_hooks.nodes_of(each)]
        prepare = partial(_prepare_at_tensor, weakref.ref(self), weakref.ref(unit), counts_at_call, nodes)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(prepare)

    def prepare(self, unit: FSDP, nodes: Iterable[Any]) -> None:
        """Prepare for a backward pass that has reached a unit.

        Args:
            unit: The unit.
            nodes: The nodes of the call that the pass has reached, which add to the gradient of the flat parameter.

        Raises:
            UnsupportedCapabilityError: The pass adds to gradients, and records its own graph.
        """
        root = self._root()
        if root is None:
            return
        records_graph = torch.is_grad_enabled()  # off in a backward pass, unless it was given create_graph=True
        if records_graph:
            keep_gathered(self._units, _gather_to_recompute)
        if self.adds_gradients(nodes):
            if records_graph:
                raise _recorded_refusal()
            self._prepare_root(root, unit)
            self._prepare_unit(unit)
            return
        task = torch._C._current_graph_task_id()
        if task not in self._tasks_without_gradients:
            self._tasks_without_gradients.add(task)
            end = partial(self._tasks_without_gradients.discard, task)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        _gather_for_pass(unit)

    def _prepare_root(self, root: FSDP, unit: FSDP) -> None:
        """Begin a pass of the root, unless it has begun; and end as one of the root a pass that runs inside one.

        Args:
            root: The root.
            unit: The unit that the pass has reached.
        """
        task = torch._C._current_graph_task_id()
        if units.is_in_backward(root):
            if task not in (self._outer_task, self._inner_task):
                # a pass inside a pass of the root: at its end FSDP1 frees the root, which the outer pass still needs
                self._inner_task = task
                torch.autograd.Variable._execution_engine.queue_callback(self.gather_again)
            return
        self._outer_task = task
        if self._is_running():
            self._begin_inside()
        elif unit is not root:  # FSDP1 begins the pass itself where it has reached the root
            queue_waiting(root)
            torch.autograd.Variable._execution_engine.queue_callback(partial(finish_frozen_units, root))
            handle = units.handle_of(root)
            if handle is not None:  # an earlier call of prepare() may have found that the pass adds no gradients
                handle._ran_pre_backward_hook = False
            _pre_backward_hook(root, root.module, handle, None)

    def _prepare_unit(self, unit: FSDP) -> None:
        """Gather a unit for the running pass, or let FSDP1 do that in a hook of its own, which comes next."""
        handle = units.handle_of(unit)
        if handle is None:
            return
        task = torch._C._current_graph_task_id()
        if _is_prepared(handle) and self._task_of_unit.get(unit) != task:  # but for a pass around this one
            handle._ran_pre_backward_hook = False
            unit.training_state = TrainingState.IDLE
        self._task_of_unit[unit] = task
        if _is_gathered(handle):
            return
        if _is_prepared(handle):  # frozen: FSDP1 frees it when the pass has visited one of its calls
            _gather(unit)
        elif units.lacks_views(handle):
            handle._needs_pre_backward_unshard = False
            _gather(unit)
        else:
            handle._needs_pre_backward_unshard = True  # FSDP1 gathers it

    def gather_again(self) -> None:
        """Gather the root's own parameters for a call inside a backward pass, which may have freed them."""
        root = self._root()
        handle = None if root is None else units.handle_of(root)
        if root is None or handle is None:
            return
        if not handle.uses_sharded_strategy and units.shows_parameters(root) and not self._is_running():
            raise UnsupportedCapabilityError(
                "sharding_strategy='NO_SHARD' can't call the model in the backward pass after a step, in which FSDP1 "
                "would not reduce its gradients.\nWrite sharding_strategy='SHARD_GRAD_OP'."
            )
        if not _is_gathered(handle) or units.shows_parameters(root):
            _gather(root, makes_views=True)
        if self.follows_calls():  # under mixed precision, what is gathered anew adds to the gradient at another node
            reduction_hooks.reduce_at_last_node(root)
            self.watch_new_nodes(root)

    def watch_new_nodes(self, unit: FSDP) -> None:
        """Prepare for backward passes that reach a unit at nodes that have come to add to its gradient."""
        for node in reduction_hooks.new_nodes_of(unit):
            node.register_prehook(partial(_prepare_at_node, weakref.ref(self), weakref.ref(unit)))

    def prepare_at_node(self, unit: FSDP, node: Any) -> None:
        """Prepare for a backward pass that is about to add to a unit's gradient, and may not have passed its output."""
        handle = units.handle_of(unit)
        if not handle.flat_param.requires_grad:  # frozen since the call: the node adds nothing
            return
        if torch.is_grad_enabled():
            raise _recorded_refusal()
        if not _is_prepared(handle) or self._task_of_unit.get(unit) != torch._C._current_graph_task_id():
            self.prepare(unit, [node])
            _pre_backward_hook(unit, unit.module, handle, None)
        reduction_hooks.reduce_at(unit, node)


def _recorded_refusal() -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        "loss.backward(create_graph=True) adds gradients that can be differentiated to parameters, which FSDP1 "
        "reduces in a way that can't be.\n"
        "Write torch.autograd.grad(loss, inputs, create_graph=True), use its result in the loss, and call "
        "backward() on that; or use strategy='fsdp2'."
    )


def _lacks_nodes(unit: FSDP) -> bool:
    """Whether a unit is trained, but FSDP1 knows no node that adds to its gradient."""
    handle = units.handle_of(unit)
    return handle is not None and handle.flat_param.requires_grad and not reduction_hooks.nodes_of(unit)


def _is_prepared(handle: Any) -> bool:
    """Whether FSDP1 has prepared a unit for a backward pass."""
    return bool(getattr(handle, "_ran_pre_backward_hook", False))  # missing before the first forward pass has ended


def _is_gathered(handle: Any) -> bool:
    """Whether a flat parameter has the memory of all elements: without sharding, always."""
    flat = handle.flat_param
    return not handle.uses_sharded_strategy or flat.data_ptr() != flat._local_shard.data_ptr()


def _gather(unit: FSDP, *, makes_views: bool = False) -> None:
    """Gather a unit for a backward pass.

    Args:
        unit: The unit.
        makes_views: Whether modules get new views of the flat parameter, instead of those of the forward pass.
    """
    handle = units.handle_of(unit)
    training_state = handle._training_state
    # FSDP1 makes new views in a forward pass, and uses those of the forward pass in a backward pass
    makes_views = makes_views or units.lacks_views(handle)
    handle._training_state = HandleTrainingState.FORWARD if makes_views else HandleTrainingState.BACKWARD_PRE
    _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
    unit._device_handle.current_stream().wait_stream(unit._unshard_stream)
    handle._training_state = training_state


@outside_of_compilation
def _gather_to_recompute(unit_ref: weakref.ref[FSDP], module: nn.Module, args: Any) -> None:
    """Gather a unit for a call of a module inside a backward pass, such as activation checkpointing makes."""
    unit = unit_ref()
    if unit is not None and torch._C._current_graph_task_id() != -1 and units.shows_parameters(unit):
        _gather(unit, makes_views=True)


@dataclass(frozen=True, kw_only=True)
class _StateBefore:
    """How :func:`_gather_for_pass` has found a unit.

    Attributes:
        training_state: The state of the unit.
        handle_state: The state of its handle; ``None`` without one.
        was_prepared: Whether FSDP1 had prepared it for a backward pass.
        was_gathered: Whether it was gathered.
        guarded: Its flat parameter, if core had it guarded.
    """

    training_state: Any
    handle_state: Any
    was_prepared: bool
    was_gathered: bool
    guarded: Sequence[Tensor]


def _gather_for_pass(unit: FSDP) -> None:
    """Gather a unit until the end of a backward pass that adds to no gradients, and let FSDP1 do nothing in it."""
    state: Any = unit
    handle = units.handle_of(unit)  # ``None`` for a root without parameters of its own
    was_prepared = units.is_in_backward(unit) if handle is None else _is_prepared(handle)
    was_gathered = handle is None or _is_gathered(handle)
    if was_prepared and was_gathered:
        return
    # a flat parameter that optimizers hold is guarded while it is a piece, but FSDP1 gathers from it
    guarded = [] if was_gathered else unguard_parameters([handle.flat_param])
    if not was_gathered:
        _gather(unit)
    else:  # the pass around this one may have gathered it ahead
        unit._device_handle.current_stream().wait_stream(unit._unshard_stream)
    if handle is None:
        state._post_backward_callback_queued = True
    else:
        handle._ran_pre_backward_hook = True
    before = _StateBefore(
        training_state=unit.training_state,
        handle_state=None if handle is None else handle._training_state,
        was_prepared=was_prepared,
        was_gathered=was_gathered,
        guarded=guarded,
    )
    torch.autograd.Variable._execution_engine.queue_callback(partial(_restore_state, unit, before))


def _restore_state(unit: FSDP, before: _StateBefore) -> None:
    """Leave a unit as it was before :func:`_gather_for_pass`."""
    state: Any = unit
    handle = units.handle_of(unit)
    if handle is None:
        state._post_backward_callback_queued = before.was_prepared
        state.training_state = TrainingState.IDLE
        return
    if not before.was_gathered:
        handle._training_state = HandleTrainingState.FORWARD  # in which FSDP1 reshards as after a forward pass
        _post_forward_reshard(unit, handle)
        if not _is_gathered(handle):
            guard_parameters(before.guarded)
    state.training_state = before.training_state
    handle._training_state = before.handle_state
    handle._ran_pre_backward_hook = before.was_prepared
    handle._needs_pre_backward_unshard = True


@outside_of_compilation
def _watch_output(
    passes_ref: weakref.ref[NestedPasses], unit_ref: weakref.ref[FSDP], module: nn.Module, args: Any, output: Any
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None and passes.follows_calls():
        passes.watch_tensors(unit, [output] if isinstance(output, Tensor) else tensors_in(output))


@outside_of_compilation
def _watch_new_nodes(
    passes_ref: weakref.ref[NestedPasses], unit_ref: weakref.ref[FSDP], module: nn.Module, args: Any
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None and passes.follows_calls():
        passes.watch_new_nodes(unit)


def _prepare_at_tensor(
    passes_ref: weakref.ref[NestedPasses],
    unit_ref: weakref.ref[FSDP],
    counts_at_call: list[int] | None,
    nodes: Sequence[Any],
    _: Tensor,
) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None:
        if counts_at_call is not None:
            refuse_written_since(unit, counts_at_call)
        passes.prepare(unit, nodes)


def _prepare_at_node(passes_ref: weakref.ref[NestedPasses], unit_ref: weakref.ref[FSDP], gradients: Any) -> None:
    passes, unit = passes_ref(), unit_ref()
    if passes is not None and unit is not None:
        passes.prepare_at_node(unit, torch._C._current_autograd_node())
